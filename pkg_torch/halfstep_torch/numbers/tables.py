"""Rounding between neighbours in tables. Contract: F8, F10. Vectors: codebook."""

import numpy as np
import torch
from torch import Tensor

from halfstep.storage.tables import DECADES, SIZE, TABLES, Table

# Infinity is appended, because numbers past 1 have no neighbour.
_NUMBERS = {
    name: torch.from_numpy(np.append(table.values, np.float32(np.inf))) for name, table in TABLES.items()
}


def encode_table(y: Tensor, words: Tensor | None, table: Table) -> Tensor:
    """Return int32 codes of float32, by int32 words or to nearest (contract F10). NaN may get any code.

    Example:
        >>> codes = encode_table(torch.tensor([0.0, 0.24, 9.0]), None, TABLES["dynamic8"])
        >>> codes.tolist(), decode_table(codes, TABLES["dynamic8"]).tolist()
        ([0, 73, 128], [0.0, 0.23359374701976776, 1.0])
    """
    # Right to 1e-4: the gap of y is the one at the floor of this, or the next one.
    position = _position(y, table) + (table.zero - 0.25)
    first = position.floor().to(torch.int32).clamp(0, SIZE - 2)
    middle = _take(table, first + 1)
    in_next = (y >= middle).to(torch.int32)
    other = _take(table, first + 2 * in_next)
    low, high = torch.minimum(middle, other), torch.maximum(middle, other)
    h = 0.5 if words is None else ((words >> 15) & 0x1FFFF | 1).to(torch.float32) * 2.0**-17
    index = first + in_next + (h * (high - low) < y - low).to(torch.int32)
    # Past the last number `_take` may give one more.
    return (index.clamp(max=SIZE - 1) - table.zero) & (SIZE - 1)


def decode_table(codes: Tensor, table: Table) -> Tensor:
    """Return the exact float32 numbers of int32 codes."""
    return _take(table, (codes + table.zero) & (SIZE - 1))


def _take(table: Table, index: Tensor) -> Tensor:
    # On an accelerator a copy of a kilobyte at every call: a copy kept there would be state of this module.
    return _NUMBERS[table.name].to(index.device)[index]


def _position(y: Tensor, table: Table) -> Tensor:
    """Return the position of y in a table, counted from its zero."""
    magnitude = y.abs() if table.signed else y
    slope, start = (torch.full_like(y, number) for number in _line(table, 0))
    for i in range(1, DECADES):
        later = magnitude >= 10.0 ** (i - DECADES)
        of_decade = _line(table, i)
        slope = torch.where(later, of_decade[0], slope)
        start = torch.where(later, of_decade[1], start)
    # Below the first number there is no decade, and this is between 0.25 and 1; of a negative one, where
    # there are none, less.
    behind = magnitude * slope + start
    return torch.where(y < 0, -behind, behind) if table.signed else behind


def _line(table: Table, decade: int) -> tuple[float, float]:
    """Return slope and offset of the position in a table over the magnitude, within a decade."""
    n = 1 if table.signed else 2
    # A decade of `count` numbers begins behind count - 1 others (signed) or count - 2.
    count = n << decade
    return count * 10.0 ** (DECADES - decade) / 9, count * 8 / 9 - (n - 0.5)
