"""Floats with a sign. Contract: F3, F5."""

import math

from halfstep.arrays import Array, Arrays
from halfstep.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep.rounding import code_of_magnitude
from halfstep.storage.base_codes import Codes, scales_of

_NAN = 0x7FC00000


class PlainCodes(Codes):
    """float32, bfloat16 or float16, with no scale."""

    @classmethod
    def of(cls, name: str) -> "PlainCodes":
        """Return the codes of a dtype."""
        fmt = FLOAT_FORMATS.get(name)
        # Squares go down to 1e-20: that takes the exponents of float32.
        return cls(name, fmt, half_gap(fmt) if fmt else 0.0, for_second_moments=name != "float16")


class FixedCodes(Codes):
    """Floats of 8 bits, kept as patterns, under the scale of a block with the maximum 7.5: none is stored."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "FixedCodes":
        """Return the codes of a format."""
        return cls("uint8", fmt, half_gap(fmt), for_second_moments=False)

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the patterns of x."""
        return code_of_magnitude(xp, x, self.numbers, words) | self.sign(xp, x)

    def sign(self, xp: Arrays, x: Array) -> Array:
        """Return the sign of x, where patterns have it."""
        bit = self.numbers.sign
        return (xp.bits(x) >> (16 if bit == 0x8000 else 24)) & bit

    def marked(self, xp: Arrays, x: Array, scale: Array, codes: Array) -> Array:
        """Return patterns as they are stored, of NaN where x is not finite."""
        return xp.where(abs(x) < math.inf, xp.stored(codes, self.dtype), self.numbers.nan_code)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers of the patterns."""
        return numbers_of(xp, codes, self.numbers)


class SignedCodes(FixedCodes):
    """Floats with a sign: a code y stands for y 2^(byte - 127 - e), e the exponent of the largest code."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "SignedCodes":
        """Return the codes of a format."""
        return cls(fmt.name, fmt, half_gap(fmt), **scales_of(fmt))

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the patterns of x over its block's scale."""
        # Of a magnitude: XLA on CPU computes x again, where it would keep an x that meets its own scale.
        y = abs(x) * xp.floats((254 + self.exponent - xp.wide(scale)) << 23)
        code = code_of_magnitude(xp, y, self.numbers, words)
        if nonzero is not False:
            # By the bits of x: XLA on CPU takes a subnormal number for zero.
            code = xp.where((xp.bits(x) > 0) & nonzero, xp.clip(code, low=1), code)
        return code | self.sign(xp, x)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers times their block's scale: exact."""
        return numbers_of(xp, codes, self.numbers) * xp.unit(scale, self.exponent)


def numbers_of(xp: Arrays, codes: Array, fmt: FloatFormat) -> Array:
    """Return the float32 numbers of patterns in int32, NaN past the largest: exact."""
    magnitude, drop = codes & (fmt.sign - 1), 23 - fmt.mantissa_bits
    # Of a normal number these are the bits of its double, and of a subnormal one the bits of its sum with
    # the smallest normal number; that difference is exact. The lesser result of both rules is right.
    bits = (magnitude << drop) + fmt.first_normal
    subnormal = xp.bits(xp.floats(bits) - 2.0**fmt.min_exponent)
    lesser = xp.clip(subnormal, high=bits - (1 << 23))
    # All ones past the largest: of a comparison and its select, torch's compiler makes more.
    past = (fmt.max_code - magnitude) >> 31
    return xp.floats(lesser | (past & _NAN) | ((codes << (16 if fmt.sign == 0x8000 else 24)) & ~0x7FFFFFFF))


def half_gap(fmt: FloatFormat) -> float:
    """Return half of the largest relative gap between normal numbers."""
    return 2.0 ** -(fmt.mantissa_bits + 1)
