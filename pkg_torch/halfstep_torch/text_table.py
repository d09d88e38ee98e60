"""Rows of words as lines of equal columns, for what is printed."""

from collections.abc import Collection, Sequence


def text_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: Collection[int] = ()) -> str:
    """Return rows under a head, every column as wide as its widest word.

    Args:
        head: of the columns.
        rows: of as many words.
        right: which columns end together, as numbers do.

    Example:
        >>> print(text_table(("name", "bytes"), [("exp_avg", "8"), ("step", "16")], right={1}))
        name     bytes
        exp_avg      8
        step        16
    """
    widths = [max(len(word) for word in column) for column in zip(head, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(f"{x:>{n}}" if i in right else f"{x:<{n}}" for i, (x, n) in cells).rstrip()

    return "\n".join(map(line, (head, *rows)))
