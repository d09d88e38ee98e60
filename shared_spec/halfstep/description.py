"""The format and rounding of each array of a run, and why: rows of both packages, and their table."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from halfstep.storage.formats import Format
from halfstep.text_table import Report, Row, Table, in_units

WEIGHT = "weight"
NOT_STORED = "no link stores it: it is rounded to nearest"
"""Of a weight that rounding to nearest is left to."""
_SHORT = 22


@dataclasses.dataclass(frozen=True)
class ArrayDescription:
    """One array of a run: a weight, or an array kept for it.

    Attributes:
        leaf: the name of the weight; of state that belongs to none, its own place.
        name: "weight", or the name of the array in the state, such as "mu".
        shape: of the weight; of other state its own.
        format: its format.
        rounding: how it is rounded.
        nbytes: with its scales.
        why: it is kept and rounded so.
        as_asked: whether it has the format that was asked for, if any was.
        per_device: bytes of it on one device, where it is cut over several; None: all.
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
    """The result of `describe`; `print` and notebooks show it as a table, equal weights as one.

    Attributes:
        arrays: weights, each followed by its arrays; then other state.
        step: in JAX a sentence: the form in which `update_params` steps the weights, and why.
    """

    arrays: tuple[ArrayDescription, ...]
    step: str = ""

    def of(self, leaf: str, name: str = WEIGHT) -> ArrayDescription:
        """Return the row of one array."""
        for row in self.arrays:
            if (row.leaf, row.name) == (leaf, name):
                return row
        raise KeyError(f"There is no {name} of '{leaf}'.")

    def table(self) -> Table:
        """Return the table: under a line for all equal weights, a line for each array."""
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
    """Return why a moment is kept so, and whether that is as asked for.

    Args:
        asked: the format that was asked for; None for the default.
        kept: that of its codes.
        shape: that is too small where the two differ.
        dtype: of the weights.
        by_default: whether a format stands there that nobody asked for.
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
    """Return names and rows of weights for which the same is kept, together, in the order of the first."""
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
    """Return the common parts of names, with a star for the rest of each part.

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
