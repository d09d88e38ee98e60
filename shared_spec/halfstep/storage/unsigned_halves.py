"""A 16-bit float without a sign, for second moments: the bit of the sign goes to the mantissa.

Contract: F21. A number times 2^80 is a float32 number from 2 up. Of its pattern the two upper bits are always
01 and the lower 14 are cut off, so that 7 bits of exponent and 9 of mantissa are the code. Numbers past the
largest one are NaN there too. Decoding is a shift, an OR and a product that is exact.
"""

import dataclasses

from halfstep.arrays import Array, Arrays
from halfstep.storage.base_codes import Codes

_DROP = 14
_CUT = (1 << _DROP) - 1
_FIRST = 0x40000000
_NAN = 0x7FFFC000
_UP, _DOWN = 2.0**80, 2.0**-80


@dataclasses.dataclass(frozen=True)
class UnsignedHalf:
    """The numbers of the format: there is no zero."""

    name: str = "ufloat16_e7m9"
    smallest: float = 2.0**-79
    largest: float = (2 - 2.0**-9) * 2.0**47


class UnsignedHalfCodes(Codes):
    """Codes of `UnsignedHalf`."""

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the codes, wrong for elements that `marked` marks."""
        return (self._rounded_pattern(xp, x, words) >> _DROP) & 0xFFFF

    def marked(self, xp: Arrays, x: Array, scale: Array, codes: Array) -> Array:
        """Return codes as they are stored: that of NaN past the largest number."""
        return xp.where(x <= self.numbers.largest, xp.stored(codes, self.dtype), self.nan_code)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers, NaN of its code: exact. The sign that codes may have in int16 is cut off."""
        return xp.floats(((codes & 0xFFFF) << _DROP) + _FIRST) * _DOWN

    def decode(self, xp: Arrays, codes: Array, scale: Array, words: Array = None) -> Array:
        """Return the float32 values of codes: a NaN needs no mark."""
        return self.values(xp, codes, scale, words)

    def patterns(self, xp: Arrays, x: Array, words: Array) -> tuple[Array, Array]:
        """Return the codes of `encode` with a sign, as int16 has them, and their values."""
        kept = self._rounded_pattern(xp, x, words) & ~_CUT
        kept = xp.where(x <= self.numbers.largest, kept, _NAN)
        return (kept << 2) >> 16, xp.floats(kept) * _DOWN

    def _rounded_pattern(self, xp: Arrays, x: Array, words: Array) -> Array:
        """Return the patterns of 2^80 x, rounded in the bits that are cut off later."""
        bits = xp.bits(x * _UP)
        add = (_CUT >> 1) + ((bits >> _DROP) & 1) if words is None else xp.shift(words, 16) & _CUT
        return xp.clip(bits + add, low=_FIRST)


UFLOAT16 = UnsignedHalfCodes("uint16", UnsignedHalf(), 2.0**-10, signed=False, nan_code=65535)
