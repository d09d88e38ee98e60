"""Code books: sorted tables of 256 numbers.

Contract: F8, F10. A number's code is how far it stands behind zero in its table, modulo the table's length:
so zero has the code 0.
"""

import dataclasses
import math

import numpy as np

from halfstep.arrays import Array, Arrays
from halfstep.storage.base_codes import Codes, carry_past

DECADES = 7
"""Of a table."""
SIZE = 256
"""How many numbers a table has."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A sorted table of float32 numbers, the last of them 1.

    Attributes:
        name: "dynamic8" and the like.
        zero: the index of zero, which has the code 0.
        values: the numbers, float32, in ascending order.
    """

    name: str
    zero: int
    values: np.ndarray = dataclasses.field(compare=False, repr=False)

    @property
    def signed(self) -> bool:
        """Whether there are negative numbers."""
        return self.zero > 0

    @property
    def by_code(self) -> np.ndarray:
        """The numbers in the order of their codes."""
        return np.roll(self.values, -self.zero)

    @property
    def largest_gap(self) -> float:
        """The largest gap between numbers from 1/10 up, over the upper one."""
        numbers = self.values[self.values >= 0.1].astype(np.float64)
        return float((np.diff(numbers) / numbers[1:]).max())

    @property
    def shorter_end(self) -> float:
        """The magnitude up to which there are numbers of either sign; of one sign: 1."""
        return float(-self.values[0]) if self.signed else 1.0

    @property
    def smallest(self) -> float:
        """The smallest number above zero."""
        return float(self.values[self.values > 0].min())


def _dynamic(name: str, signed: bool) -> Table:
    """Return the dynamic map: zero, one, and decades of evenly spaced numbers."""
    numbers = [np.array([0, 1], np.float32)]
    for i in range(DECADES):
        n = 2**i if signed else 2 ** (i + 1)
        # 1 + 9 (k + 1/2) / n: exact, as is the power of ten; so the quotient is the only rounding.
        numerator = np.float32(1) + np.float32(9) * np.arange(0.5, n, dtype=np.float32) / np.float32(n)
        quotient = numerator / np.float32(10 ** (DECADES - i))
        numbers += [quotient, -quotient] if signed else [quotient]
    values = np.sort(np.concatenate(numbers))
    return Table(name, int(np.argmin(np.abs(values))), values)


TABLES = {
    table.name: table for table in (_dynamic("dynamic8", signed=True), _dynamic("udynamic8", signed=False))
}


class TableCodes(Codes):
    """Numbers of a table: the number of a code stands for number 2^(byte - 127)."""

    @classmethod
    def of(cls, table: Table) -> "TableCodes":
        """Return the codes of a table."""
        # A maximum fits on either side of zero: a signed table ends short of -1.
        fraction, exponent = math.frexp(table.shorter_end)
        return cls(
            "uint8",
            table,
            table.largest_gap / 2,
            signed=table.signed,
            # A sign that is always the same costs half of the numbers, and the small ones.
            for_second_moments=not table.signed,
            nan_in_scale=True,
            # An average that decays from the smallest number passes half of it; and the inverse of the
            # largest scale is normal too.
            scale_range=(3 - math.frexp(table.smallest)[1], 253),
            carry=carry_past(fraction),
            step=1 - exponent,
        )

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the codes of x over its block's scale."""
        codes = xp.table_codes(x * xp.floats((254 - xp.wide(scale)) << 23), words, self.numbers)
        if nonzero is not False:
            # By bits: XLA on CPU takes a subnormal number for zero.
            codes = xp.where((xp.bits(x) > 0) & nonzero & (codes == 0), 1, codes)
        return codes

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers times their block's scale: exact."""
        return xp.table_numbers(codes, self.numbers) * xp.unit(scale)
