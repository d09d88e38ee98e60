"""The end that the benchmarks of quality share: print tables, say which claims hold, write the record.

A benchmark calls `arguments` first and `finish` last. Its exit status is 1 where a claim fails. So every
sentence of the documents that rests on a table is checked whenever the table is printed.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str:
        """What it is called in the first column."""
        ...


Row = TypeVar("Row", bound=Named)


def arguments(
    description: str, steps: int | None = None, rows: bool = False, transformer: int | None = None
) -> argparse.Namespace:
    """Return the command line's arguments: `json`, `only` of the rows of a table, and steps of training.

    `transformer` is 0 unless it is asked for in place of the usual model.
    """
    parser = argparse.ArgumentParser(description=description)
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps, help=f"of training, by default {steps}")
    if transformer is not None:
        what = f"train the transformer instead, by default for {transformer} steps"
        parser.add_argument("--transformer", type=int, nargs="?", const=transformer, default=0, help=what)
    if rows:
        parser.add_argument("--only", nargs="*", default=[""], help="rows in whose names one of these stands")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    return parser.parse_args()


def chosen(rows: Iterable[Row], only: Iterable[str]) -> list[Row]:
    """Return the first row, which others are held against, and rows with one of some texts in their names."""
    first, *others = rows
    return [first, *(row for row in others if any(text in row.name for text in only))]


def print_table(head: str, rows: Iterable[Iterable[object]]) -> None:
    """Print a Markdown table.

    Args:
        head: names of the columns, divided by "|"; one that begins with "<" holds text, the others numbers.
        rows: cells, as they are to be printed.
    """
    names = [name.strip() for name in head.split("|")]
    print(f"| {' | '.join(name.removeprefix('<') for name in names)} |")
    print("|" + "|".join("---" if name.startswith("<") else "--:" for name in names) + "|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print()


def finish(held: Mapping[str, bool], figures: object, record: pathlib.Path | None) -> int:
    """Print which sentences hold, write the figures to `record`, and return the exit status."""
    for sentence, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}: {sentence}")
    if record:
        record.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(held.values()) else 1
