"""Tables as HTML and as lines with at most 100 columns, and bytes in units, for printing."""

import dataclasses
import html
import textwrap
from collections.abc import Collection, Sequence

WIDTH = 100
"""Largest width of a table in columns, for terminals and logs."""

Row = tuple[str, ...] | str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under a head. A row with a single text is a heading.

    Attributes:
        head: the head of each column.
        rows: rows with a word per column.
        right: the columns with numbers.
        notes: paragraphs below the table.
    """

    head: tuple[str, ...]
    rows: Sequence[Row]
    right: Collection[int] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        lines = text_table(self.head, self.rows, self.right)
        notes = [textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join([lines, *notes])

    def html(self) -> str:
        """Return the table as HTML, as notebooks show it."""
        rows = [self._html_row("th", self.head), *(self._html_row("td", row) for row in self.rows)]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table>{''.join(rows)}</table>{notes}"

    def _html_row(self, tag: str, row: Row) -> str:
        if isinstance(row, str):
            return f'<tr><th colspan="{len(self.head)}" style="text-align:left">{html.escape(row)}</th></tr>'
        cells = []
        for i, text in enumerate(row):
            side = "right" if i in self.right else "left"
            cells.append(f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"


class Report:
    """A result that `print` and a notebook show as a table."""

    def table(self) -> Table:
        """Return the displayed table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def text_table(head: tuple[str, ...], rows: Sequence[Row], right: Collection[int] = ()) -> str:
    """Return rows under a head, with every column as wide as its widest word.

    `right` are the columns with numbers. If the table is wider than 100 columns, the widest words are cut in
    the middle.

    Example:
        >>> print(text_table(("name", "bytes"), [("mu", "8"), ("nu", "16")], right={1}))
        name  bytes
        mu        8
        nu       16
    """
    words = [row for row in rows if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(head, *words, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in (head, *rows):
        if isinstance(row, str):
            lines.append(cut(row, WIDTH))
            continue
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cut(x, n).rjust(n) if i in right else cut(x, n).ljust(n) for i, (x, n) in pairs]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def cut(text: str, width: int) -> str:
    """Return a text cut to a width, with one sign in place of the middle part.

    Example:
        >>> cut("encoder.layers.0.weight", 12)
        'encode…eight'
    """
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def in_units(nbytes: float) -> str:
    """Return a number of bytes as text. A GB is 10^9 bytes.

    Example:
        >>> [in_units(n) for n in (999, 1500, 3e9)]
        ['999 B', '1.50 kB', '3.00 GB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
