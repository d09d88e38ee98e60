"""Unsigned 8-bit floats for second moments: no sign, no subnormal numbers, zero for zero alone.

Contract: F6. Code 0 is zero; code c > 0 is float32's own pattern, cut to M mantissa bits and counted from a
base: (c + base) << (23 - M). So encoding is an addition, a shift and a clamp.
"""

import dataclasses
import math

from halfstep.arrays import Array, Arrays
from halfstep.rounding import cut, draw
from halfstep.storage.base_codes import NAN_SCALE, Codes


@dataclasses.dataclass(frozen=True)
class UnsignedFloat:
    """A format of `exponent_bits` + `mantissa_bits` = 8.

    Attributes:
        name: "ufloat8_e5m3" and the like.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int

    def base(self, byte: Array) -> Array:
        """Return the base for which the second highest binade has the float32 exponent field `byte`.

        Args:
            byte: the scale bytes, in an array of at least 16 bits.
        """
        return (byte - (2**self.exponent_bits - 2)) << self.mantissa_bits


E5M3 = UnsignedFloat("ufloat8_e5m3", 5, 3)


class UnsignedCodes(Codes):
    """Unsigned floats with a base for each block."""

    @classmethod
    def of(cls, fmt: UnsignedFloat) -> "UnsignedCodes":
        """Return the codes of a format."""
        # From the byte for which the smallest number of the block is normal.
        scale_range = (2**fmt.exponent_bits - 1, 253)
        gap = 2.0 ** -(fmt.mantissa_bits + 1)
        return cls("uint8", fmt, gap, signed=False, nan_in_scale=True, scale_range=scale_range)

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return codes counted from the base of their block; only zero, of either sign, gets 0."""
        drop = 23 - self.numbers.mantissa_bits
        bits = xp.bits(x) & 0x7FFFFFFF
        if words is None:
            code = cut(xp, bits, None, drop)
        else:
            code = (bits + (draw(xp, words, drop) + self._root_term(bits))) >> drop
        return xp.clip(code - self.numbers.base(xp.wide(scale)), xp.clip(bits, high=1), 255)

    def marked(self, xp: Arrays, x: Array, scale: Array, codes: Array) -> Array:
        """Return codes as they are stored. Marks are looked for in int32: a TPU moves less for it."""
        return super().marked(xp, x, xp.wide(scale), codes)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers from the base of their block up."""
        values = unsigned_values(xp, codes, self.numbers, self.numbers.base(xp.wide(scale)))
        return xp.where(scale == NAN_SCALE, math.nan, values)

    def _root_term(self, bits: Array) -> Array:
        """Return the number that rounding adds to keep the mean of x^(1/4), and not of x.

        A step divides by the root of a second moment, so E[x^(-1/2)] must be right. Let f be the fraction
        that is cut off, and k 3/8 of the gap, divided by the number that is kept. The chance of the next
        number is f + k f (1 - f). Eleven bits of f are enough, and a straight line instead of 1 / mantissa.
        """
        m = self.numbers.mantissa_bits
        kept, cut_off = bits >> (23 - m) & (1 << m) - 1, bits >> (12 - m) & 2047
        # Factors of two are taken out of 368 - (192 >> M) m, which so takes fewer instructions.
        return cut_off * (2047 - cut_off) * ((23 << m - 2) - 3 * kept) >> (3 + 3 * m)


UFLOAT8 = UnsignedCodes.of(E5M3)


def unsigned_values(xp: Arrays, codes: Array, fmt: UnsignedFloat, base: Array) -> Array:
    """Return the float32 values of codes: exact; of 0 zero."""
    return xp.floats(((codes + base) << (23 - fmt.mantissa_bits)) & (-codes >> 31))
