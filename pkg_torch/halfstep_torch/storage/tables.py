"""Codebooks: sorted tables of 256 or 16 numbers, and rounding between neighbours in them.

Contract: F8, F10. Vectors: codebook. The code of a number is how far it stands behind zero in its table,
modulo the table's length: memory of zeros is zero.
"""

import dataclasses
import itertools
import math

import torch
from torch import Tensor

# A private name of torch: it asks not whether an index is in bounds, which is so here; in a GPU's kernel the
# question is a barrier and a call, which take registers.
_index = getattr(torch.ops.aten, "_unsafe_index", torch.ops.aten.index)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A sorted table of float32 numbers, the last of them 1. What kernels read as constants is plain numbers.

    Attributes:
        name: "dynamic8" and the like.
        decades: how many a dynamic map has; 0: the numbers are evenly spaced, with no zero.
        size: how many numbers there are: 256, or 16.
        zero: the index whose code is 0: that of zero, or 0.
        smallest: the smallest number above zero.
        half_gap: half the largest gap between numbers from 1/10 up, over the upper one.
        past: what to add to the pattern of a maximum, and then to its exponent field, to get the scale byte:
            a signed table ends short of -1, and a maximum must fit on either side of zero, so it goes to the
            next exponent past the mantissa of that end, whose own exponent is one below that of 1.
        numbers: float32, in ascending order, and infinity behind them: what is past 1 has no neighbour.
    """

    name: str
    decades: int
    size: int
    zero: int
    smallest: float
    half_gap: float
    past: tuple[int, int]
    numbers: Tensor

    @property
    def packed(self) -> bool:
        """Whether codes are of 4 bits."""
        return self.size == 16

    @property
    def signed(self) -> bool:
        """Whether there are negative numbers."""
        return self.zero > 0

    @property
    def has_zero(self) -> bool:
        """Whether zero is one of the numbers."""
        return self.decades > 0

    @property
    def lowest(self) -> int:
        """The scale byte under which half of the smallest number is still normal in float32."""
        return 3 - math.frexp(self.smallest)[1]


def _dynamic(name: str, decades: int, signed: bool) -> Table:
    """Return the dynamic map: zero, one, and decades of evenly spaced numbers, the later the more."""
    numbers = []
    for i in range(decades):
        n = (1 if signed else 2) << i
        numbers += [(1 + 9 * (k + 0.5) / n) / 10 ** (decades - i) for k in range(n)]
    negative = [-x for x in reversed(numbers)] if signed else []
    return _table(name, decades, [*negative, 0.0, *numbers, 1.0])


def _table(name: str, decades: int, numbers: list[float]) -> Table:
    """Return the table of numbers that are quotients of integers of at most 24 bits.

    Rounded to 53 bits and then to 24 they are what they are rounded to 24 at once, since 53 >= 2 * 24 + 2.
    """
    rounded = torch.tensor([*numbers, math.inf], dtype=torch.float64).to(torch.float32)
    zero = numbers.index(0.0) if 0.0 in numbers else 0
    smallest = float(rounded[rounded > 0].min())
    top = [x for x in rounded.tolist() if 0.1 <= x <= 1]
    half_gap = max((high - low) / high for low, high in itertools.pairwise(top)) / 2
    fraction, exponent = math.frexp(-float(rounded[0]) if zero else 1.0)
    past = (1 << 23) - 1 - int((2 * fraction - 1) * (1 << 23)), 1 - exponent
    return Table(name, decades, len(numbers), zero, smallest, half_gap, past, rounded)


TABLES = {
    table.name: table
    for table in (
        _dynamic("dynamic8", 7, signed=True),
        _dynamic("udynamic8", 7, signed=False),
        _dynamic("dynamic4", 3, signed=True),
        _dynamic("udynamic4", 3, signed=False),
        _table("ulinear4", 0, [(i + 1) / 16 for i in range(16)]),
    )
}


def encode_table(y: Tensor, words: Tensor | None, table: Table) -> Tensor:
    """Round float32 to codes: up from the number below if h gap < y - number.

    Args:
        y: float32; below the first number it gets the first, above the last the last. Of NaN, any code.
        words: int32 words: h = (2 (word >> 16) + 1) / 2^17; or None: h = 1/2.
        table: of the codes.

    Returns:
        int32 codes.

    Example:
        >>> codes = encode_table(torch.tensor([0.0, 0.24, 9.0]), None, TABLES["dynamic4"])
        >>> codes.tolist(), decode_table(codes, TABLES["dynamic4"]).tolist()
        ([0, 4, 8], [0.0, 0.21250000596046448, 1.0])
    """
    # Right to 1e-4: the gap of y is the one at the floor of this, or the next one.
    position = _position(y, table) + (table.zero - 0.25)
    first = position.floor().to(torch.int32).clamp(0, table.size - 2)
    middle = _take(table, first + 1)
    in_next = (y >= middle).to(torch.int32)
    other = _take(table, first + 2 * in_next)
    low, high = torch.minimum(middle, other), torch.maximum(middle, other)
    h = 0.5 if words is None else ((words >> 15) & 0x1FFFF | 1).to(torch.float32) * 2.0**-17
    index = first + in_next + (h * (high - low) < y - low).to(torch.int32)
    # Past the last number `_take` may give one more.
    return (index.clamp(max=table.size - 1) - table.zero) & (table.size - 1)


def decode_table(codes: Tensor, table: Table) -> Tensor:
    """Return the float32 numbers of int32 codes: exact."""
    return _take(table, (codes + table.zero) & (table.size - 1))


def _take(table: Table, index: Tensor) -> Tensor:
    if not table.has_zero:
        return (index + 1).to(torch.float32) * (1 / table.size)
    # On an accelerator a copy of a kilobyte at every call: a copy kept there would be state of this module.
    return _index(table.numbers.to(index.device), [index])


def _position(y: Tensor, table: Table) -> Tensor:
    """Return how far behind the zero of a table y stands: the i-th number at i."""
    if not table.has_zero:
        return y * 16 - 1
    magnitude = y.abs() if table.signed else y
    slope, start = (torch.full_like(y, number) for number in _line(table, 0))
    for i in range(1, table.decades):
        later = magnitude >= 10.0 ** (i - table.decades)
        of_decade = _line(table, i)
        slope = torch.where(later, of_decade[0], slope)
        start = torch.where(later, of_decade[1], start)
    # Below the first number there is no decade, and this is between 0.25 and 1; of a negative one, where
    # there are none, less.
    behind = magnitude * slope + start
    return torch.where(y < 0, -behind, behind) if table.signed else behind


def _line(table: Table, decade: int) -> tuple[float, float]:
    """Return by how much the place behind zero grows with the magnitude in a decade, and what it is at 0."""
    n = 1 if table.signed else 2
    # A decade of `count` numbers begins behind count - 1 others (signed) or count - 2.
    count = n << decade
    return count * 10.0 ** (table.decades - decade) / 9, count * 8 / 9 - (n - 0.5)
