"""The format and rounding of each array in a run, with reasons, as rows for both packages and a table."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from halfstep.storage.formats import Format
from halfstep.text_table import Report, Row, Table, in_units

WEIGHT = "weight"
NOT_STORED = "no link stores it: it is rounded to nearest"
"""Reason for a weight that is rounded to nearest."""
_SHORT = 22


@dataclasses.dataclass(frozen=True)
class ArrayDescription:
    """One array in a run, which is a weight or an array kept for it.

    Attributes:
        leaf: the weight's name, or the place of state that belongs to no weight.
        name: "weight", or the array's name in the state, such as "mu".
        shape: the weight's shape, or the state's own shape if it belongs to no weight.
        format: its format.
        rounding: its rounding.
        nbytes: size in bytes, with scales.
        why: the reason for its format and rounding.
        as_asked: whether it has the requested format, or none was requested.
        per_device: bytes on one device if the array is sharded, or None if every device has all bytes.
    """

    leaf: str
    name: str
    shape: tuple[int, ...]
    format: str
    rounding: str
    nbytes: int
    why: str
    as_asked: bool = True
    per_device: int | None = None


@dataclasses.dataclass(frozen=True)
class Description(Report):
    """The result of `describe`. `print` and notebooks show it as a table, in which equal weights are merged.

    Attributes:
        arrays: weights, each followed by its arrays, and then other state.
        step: a sentence about the form in which JAX's `update_params` steps the weights, and why.
    """

    arrays: tuple[ArrayDescription, ...]
    step: str = ""

    def of(self, leaf: str, name: str = WEIGHT) -> ArrayDescription:
        """Return the row for one array."""
        for row in self.arrays:
            if (row.leaf, row.name) == (leaf, name):
                return row
        raise KeyError(f"There is no {name} of '{leaf}'.")

    def table(self) -> Table:
        """Return the table. Equal weights share a line, followed by a line per array."""
        is_cut = any(row.per_device is not None for row in self.arrays)
        head = ("array", "format", "rounding", "bytes", *(["per device"] if is_cut else []), "why")
        notes: dict[str, str] = {}
        rows: list[Row] = []
        for names, blocks in _equal_leaves(self.arrays):
            many = f" x{len(names)}" if len(names) > 1 else ""
            rows.append(f"{_pattern(names)}{many}  {list(blocks[0][0].shape)}")
            for same in zip(*blocks, strict=True):
                x, nbytes = same[0], sum(row.nbytes for row in same)
                here = sum(row.nbytes if row.per_device is None else row.per_device for row in same)
                why = x.why
                if len(why) > _SHORT:
                    why = notes.setdefault(why, f"note {len(notes) + 1}")
                sizes = [in_units(nbytes), *([in_units(here)] if is_cut else [])]
                rows.append((f"  {x.name}", x.format, x.rounding, *sizes, why))
        right = range(3, 5 if is_cut else 4)
        below = [*(f"{note}: {why}" for why, note in notes.items()), *([self.step] if self.step else [])]
        return Table(head, rows, right, below)


def moment_reason(
    asked: Format | None, kept: Format, shape: tuple[int, ...], dtype: str, by_default: bool = False
) -> tuple[str, bool]:
    """Return the reason for a moment's format, and whether it is the requested format.

    Args:
        asked: the requested format, or None for the default.
        kept: the format in use.
        shape: the weight's shape, which is too small for `asked` if the two formats differ.
        dtype: the weights' dtype.
        by_default: whether `asked` is a default instead of a request.
    """
    if asked is None or by_default:
        return f"by default for weights that the link sees in {dtype}", True
    if too_small := asked.too_small(shape):
        return f"asked for {asked.text}, but {too_small}", False
    return "asked for", asked.text == kept.text


def nbytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * itemsize


def _equal_leaves(
    arrays: Sequence[ArrayDescription],
) -> list[tuple[list[str], list[list[ArrayDescription]]]]:
    """Return names and rows, grouped by weights with equal arrays, in order of first appearance."""
    leaves: dict[str, list[ArrayDescription]] = collections.defaultdict(list)
    for row in arrays:
        leaves[row.leaf].append(row)
    groups: dict[tuple, tuple[list[str], list[list[ArrayDescription]]]] = {}
    for name, rows in leaves.items():
        parts = _parts(name)
        alike = [dataclasses.replace(row, leaf="") for row in rows]
        names, blocks = groups.setdefault((len(parts), parts[-1], *alike), ([], []))
        names.append(name)
        blocks.append(rows)
    return list(groups.values())


def _parts(name: str) -> list[str]:
    return name.split(_separator(name))


def _separator(name: str) -> str:
    return "/" if "/" in name else "."


def _pattern(names: Sequence[str]) -> str:
    """Return the parts that names have in common, with a star for the rest of each part.

    Example:
        >>> _pattern(["layers.0.weight", "layers.11.weight"])
        'layers.*.weight'
        >>> _pattern(["block_0/w", "block_1/w"])
        'block_*/w'
    """
    columns = (set(column) for column in zip(*map(_parts, names), strict=True))
    stars = (x.pop() if len(x) == 1 else f"{_start(min(x), max(x))}*" for x in columns)
    return _separator(names[0]).join(stars)


def _start(a: str, b: str) -> str:
    """Return the common beginning of two texts."""
    return "".join(
        x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )
