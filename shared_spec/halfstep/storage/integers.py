"""Integers under a power of two, or under a scale of three significant bits. Contract: F5, F14, F15."""

import math

import numpy as np

from halfstep.arrays import Array, Arrays
from halfstep.float_formats import INT4, INT8, FloatFormat
from halfstep.rounding import draw, whole
from halfstep.storage.base_codes import NAN_SCALE, Codes, scales_of
from halfstep.storage.unsigned_floats import UnsignedFloat, unsigned_values

DEAD_ZONE = 1 / 16
"""The share of a unit up to which dithered codes store exact zero: an average that decays ends there."""
FINE_SCALE = UnsignedFloat("fine", 6, 2)
"""A scale: three significant bits, counted from"""
FINE_BASE = 77 << 2
"""the pattern of 2^-50."""


class IntegerCodes(Codes):
    """int8 under a power of two: floats that are all subnormal, with the quantum 1, one zero and no NaN."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "IntegerCodes":
        """Return the codes of a format."""
        # Of all gaps the largest is below the largest code; and integers raise small numbers by orders.
        gap = 0.5 / fmt.max
        return cls(fmt.name, fmt, gap, nan_in_scale=True, for_second_moments=False, **scales_of(fmt))

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return x over the scale, rounded to integers that stop at 127."""
        # Of a magnitude: XLA on CPU computes x again, where it would keep an x that meets its own scale.
        size = abs(x) * xp.floats((254 + self.exponent - xp.wide(scale)) << 23)
        return _with_sign(xp, x, size, words, nonzero, int(self.numbers.max))

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the integers times the scale: exact."""
        return xp.real(codes) * xp.unit(scale, self.exponent)


class FineIntegerCodes(Codes):
    """Integers from -K to K under a fine scale s, of three significant bits: the stored value is q s."""

    @classmethod
    def of(cls, dtype: str, fmt: FloatFormat, packed: bool = False) -> "FineIntegerCodes":
        """Return the codes of integers."""
        return cls(
            dtype,
            fmt,
            0.5 / fmt.max,
            for_second_moments=False,
            packed=packed,
            nan_in_scale=True,
            dithered=packed,
            scale_range=(1, 254),
        )

    @property
    def largest(self) -> int:
        """K."""
        return int(self.numbers.max)

    def scale_byte(self, xp: Arrays, block_max: Array) -> Array:
        """Return the scales, rounded up: `block_max` over K fits. Past the largest scale comes NaN."""
        drop = 23 - FINE_SCALE.mantissa_bits
        least = xp.bits(block_max * float(np.float32(1 / self.largest)))
        return xp.clip(((least + ((1 << drop) - 1)) >> drop) - FINE_BASE, 1, NAN_SCALE)

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return x / s, rounded to integers that stop at K. A quotient: of q s it is the integer again."""
        ratio = xp.quotient(abs(x), unsigned_values(xp, xp.wide(scale), FINE_SCALE, FINE_BASE))
        return _with_sign(xp, x, ratio, words, nonzero, self.largest)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the integers times s: exact."""
        return xp.real(codes) * self._unit(xp, scale)

    def _unit(self, xp: Arrays, scale: Array) -> Array:
        unit = unsigned_values(xp, xp.wide(scale), FINE_SCALE, FINE_BASE)
        return xp.where(scale == NAN_SCALE, math.nan, unit)


class DitheredCodes(FineIntegerCodes):
    """Integers from -7 to 7 in four bits, rounded with a dither d: the stored value is (q - d) s.

    The code is q + 8; 0 is exact zero, and the code of |y| up to 1/16. d is a number in (-1/2, 1/2) of
    the words, which are alike throughout a block; None: d is 0.
    """

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return x / s + d, rounded to nearest integers that stop at 7, and 8 above that; 0 near zero."""
        unit = unsigned_values(xp, xp.wide(scale), FINE_SCALE, FINE_BASE)
        q = xp.clip(xp.nearest(xp.quotient(x, unit) + _dither(xp, words)), -self.largest, self.largest)
        # That is |x / s| <= 1/16: s has three bits, so that no x is so near above s/16 that x / s is 1/16. A
        # quotient with two uses XLA on CPU keeps in float32.
        return xp.where(abs(x) <= unit * DEAD_ZONE, 0, xp.integer(q) + 8)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return (q - d) s, rounded once; `words` made the codes."""
        values = (xp.real(codes - 8) - _dither(xp, words)) * self._unit(xp, scale)
        return xp.where((codes == 0) & (scale != NAN_SCALE), 0.0, values)


FINE_CODES = {"int8": FineIntegerCodes.of("int8", INT8), "int4": DitheredCodes.of("uint8", INT4, packed=True)}


def _with_sign(xp: Arrays, x: Array, size: Array, words: Array, nonzero: Array, largest: int) -> Array:
    """Return magnitudes, rounded to integers that stop at the largest, with the signs of x."""
    size = xp.clip(whole(xp, xp.clip(size, high=128.0), words), high=largest)
    if nonzero is not False:
        # By bits: XLA on CPU takes a subnormal number for zero.
        size = xp.where((xp.bits(x) > 0) & nonzero, xp.clip(size, 1), size)
    return xp.where(xp.bits(x) < 0, -size, size)


def _dither(xp: Arrays, words: Array) -> Array:
    """Return odd multiples of 2^-17 in (-1/2, 1/2), from the top 16 bits; q less such a d is exact."""
    return 0.0 if words is None else xp.real(draw(xp, words, 16) << 1 | 1) * 2.0**-17 - 0.5
