"""Rows of words as lines of equal columns, and bytes in units, for what is printed."""

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


def in_units(nbytes: float) -> str:
    """Return a number of bytes as text.

    Example:
        >>> [in_units(n) for n in (1000, 1536, 3 * 2**30)]
        ['1000 B', '1.50 KiB', '3.00 GiB']
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
