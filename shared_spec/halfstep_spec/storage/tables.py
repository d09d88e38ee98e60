"""Codebooks: sorted tables of 256 numbers, and rounding between neighbours in them.

Contract: F8, F10. Vectors: codebook.
"""

import dataclasses
import functools
import math
from fractions import Fraction

import numpy as np


@dataclasses.dataclass(frozen=True)
class Table:
    """A sorted table of float32 numbers, the last of them 1.

    Attributes:
        name: "dynamic8" and the like.
        signed: whether there are negative numbers.
        exact: the numbers as fractions, before they are rounded to float32.
    """

    name: str
    signed: bool
    exact: tuple[Fraction, ...]

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The numbers, float32, in ascending order."""
        return np.array([_nearest_float32(x) for x in self.exact], np.float32)

    @property
    def zero(self) -> int:
        """The index of zero, which has the code 0."""
        return self.exact.index(Fraction(0))

    @property
    def lowest(self) -> int:
        """The lowest scale byte: half of the smallest magnitude above zero is normal in float32 under it."""
        smallest = min(abs(x) for x in self.values.tolist() if x)
        return 127 - 125 - (math.frexp(smallest)[1] - 1)

    @property
    def carry(self) -> int:
        """The number that brings the pattern of a maximum to the exponent field of its scale byte.

        The smallest number below zero is nearer than -1: a maximum must fit on either side, or the mean of
        rounded numbers would be too near to zero.
        """
        end = np.float32(-self.values[0]) if self.signed else np.float32(1)
        mantissa = int(end.view(np.uint32)) & 0x7FFFFF
        return 0x7FFFFF - mantissa + (0x800000 if end < 1 else 0)

    @property
    def half_gap(self) -> float:
        """Half the largest relative gap between numbers of the top decade, 1/10 to 1."""
        top = self.values[self.values >= 0.1].astype(np.float64)
        return float(((top[1:] - top[:-1]) / top[1:]).max()) / 2


def _nearest_float32(x: Fraction) -> np.float32:
    """Return the float32 number nearest to `x`, ties to even; for normal numbers."""
    if not x:
        return np.float32(0)
    exponent = math.floor(math.log2(abs(x)))
    ulp = Fraction(2) ** (exponent - 23)
    return np.float32(float(round(x / ulp) * ulp))


def _dynamic(name: str, signed: bool) -> Table:
    """Return the dynamic map: zero, one, and d = 7 decades of evenly spaced numbers.

    Decade i = 0 .. d - 1 has n = 2^i numbers of either sign, or without a sign n = 2^(i + 1):
    (1 + 9 (k + 1/2) / n) / 10^(d - i), k = 0 .. n - 1.
    """
    decades, numbers = 7, {Fraction(0), Fraction(1)}
    for i in range(decades):
        n = 2**i if signed else 2 ** (i + 1)
        for k in range(n):
            x = (1 + 9 * (k + Fraction(1, 2)) / n) / 10 ** (decades - i)
            numbers |= {x, -x} if signed else {x}
    return Table(name, signed, tuple(sorted(numbers)))


TABLES = {
    table.name: table for table in (_dynamic("dynamic8", signed=True), _dynamic("udynamic8", signed=False))
}


def encode_table(y: np.ndarray, words: np.ndarray | None, table: Table) -> np.ndarray:
    """Round float32 `y` to codes: up from the number below if h gap < y - number.

    Args:
        y: float32; below the first number it gets the first, above the last the last.
        words: uint32: h = (2 (word >> 16) + 1) / 2^17; or None: h = 1/2.
        table: of the codes.

    Returns:
        uint8: how far the number stands behind zero in the table, modulo its length.
    """
    values = table.values
    below = np.clip(np.searchsorted(values, y, side="right") - 1, 0, values.size - 1)
    above = np.minimum(below + 1, values.size - 1)
    h = np.float32(0.5) if words is None else _fraction(words)
    with np.errstate(invalid="ignore"):
        up = h * (values[above] - values[below]) < y - values[below]
    index = np.where(up, above, below)
    return ((index - table.zero) % values.size).astype(np.uint8)


def decode_table(codes: np.ndarray, table: Table) -> np.ndarray:
    """Return the float32 number of every code: exact."""
    return table.values[(codes.astype(np.int64) + table.zero) % table.values.size]


def _fraction(words: np.ndarray) -> np.ndarray:
    """Return odd multiples of 2^-17 in (0, 1), from the top 16 bits."""
    odd = 2 * (np.asarray(words, np.uint32) >> np.uint32(16)) + np.uint32(1)
    return odd.astype(np.float32) * np.float32(2.0**-17)
