"""Rows of words as lines of equal columns, for what is printed."""

from collections.abc import Collection


def text_table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: Collection[int] = ()) -> str:
    """Return rows under a head, every column as wide as its widest word; `right` are columns of numbers.

    Example:
        >>> print(text_table(("name", "bytes"), [("mu", "8"), ("nu", "16")], right={1}))
        name  bytes
        mu        8
        nu       16
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            x.rjust(n) if i in right else x.ljust(n) for i, (x, n) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
