"""Integers under a scale of three significant bits, and codes under a scale that is the same for all blocks.

Contract: F13 to F15.
"""

import math

import numpy as np
import torch
from torch import Tensor

from halfstep.float_formats import INT8
from halfstep.storage.codes import DEAD_ZONE
from halfstep.storage.unsigned_floats import UNSIGNED_FLOATS
from halfstep_torch.numbers.patterns import from_patterns
from halfstep_torch.numbers.rounding import round_to_patterns, rounded
from halfstep_torch.storage.base_codes import NAN_SCALE, Codes
from halfstep_torch.storage.unsigned_floats import decode_unsigned

_SCALES = UNSIGNED_FLOATS["ufloat8_e6m2"]


class FixedCodes(Codes):
    """Floats of 8 bits, kept as patterns, under the scale of a block with the maximum 7.5: none is stored."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the patterns of x, rounded."""
        return round_to_patterns(x, self.numbers, words)[0]

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the patterns, and the numbers, which rounding knows without them."""
        return round_to_patterns(x, self.numbers, words)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return the numbers of the patterns."""
        return from_patterns(codes.to(torch.int32), self.numbers)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers themselves."""
        return wide


class FixedIntegerCodes(Codes):
    """int8 under one scale, 1/16; -128 is NaN."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x over the scale, rounded, or -128."""
        # Past 8 it saturates; a number that 16 takes past float32's largest one does too.
        integers = rounded(x.clamp(-8.0, 8.0) * 16.0, self.numbers, words, saturate=True)
        return torch.where(x.abs() < math.inf, integers, -128.0)

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the integers, and what they decode to."""
        wide = self.encode(x, None, words, nonzero)
        # Integers have one zero; that of a float32 with a sign would be seen in a weight that is -0.0.
        return wide, self.decode(wide, None) + 0.0

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the integers times the scale."""
        return torch.where(wide == -128, math.nan, wide * (1 / 16))


class FineIntegerCodes(Codes):
    """Integers from -K to K under a fine scale s, an `ufloat8_e6m2`: q s is what was stored."""

    @property
    def largest(self) -> int:
        """K."""
        return int(self.numbers.max)

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the scales, rounded up: `block_max` over K fits. Past the largest scale comes NaN."""
        least = (block_max * float(np.float32(1 / self.largest))).view(torch.int32)
        drop = 23 - _SCALES.mantissa_bits
        return ((least + ((1 << drop) - 1) >> drop) - _SCALES.fixed_base).clamp(1, NAN_SCALE)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x / s, rounded to integers that stop at K."""
        assert scale is not None
        integers = rounded(x / self._unit(scale), INT8, words, saturate=True)
        integers = integers.clamp(-self.largest, self.largest)
        if nonzero is not False:
            integers = torch.where((x > 0) & (integers == 0) & nonzero, 1.0, integers)
        return torch.where(scale == NAN_SCALE, 0.0, integers)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the integers times s: exact. Zero has no sign, though one that was rounded may."""
        assert scale is not None
        return wide * torch.where(scale == NAN_SCALE, math.nan, self._unit(scale)) + 0.0

    def _unit(self, scale: Tensor) -> Tensor:
        return decode_unsigned(scale, _SCALES, _SCALES.fixed_base)


class DitheredCodes(FineIntegerCodes):
    """Integers from -7 to 7 in four bits, rounded with a dither d: (q - d) s is what was stored.

    The code is q + 8; 0 is exact zero, and what is stored of |y| up to 1/16. d is a number in (-1/2, 1/2) of
    the words, one of a block; None: d is 0.
    """

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x / s + d, rounded to nearest integers that stop at 7, and 8 above that; 0 near zero."""
        assert scale is not None
        y = x / self._unit(scale)
        q = (y + _dither(words)).round().clamp(-self.largest, self.largest)
        # What is not finite marks its block, where codes are 0.
        zero = (y.abs() <= DEAD_ZONE) | (scale == NAN_SCALE)
        return torch.where(zero, 0, q.nan_to_num(0.0).to(torch.int32) + 8)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return (q - d) s, rounded once; `words` are those with which the codes were made."""
        assert scale is not None
        values = ((wide - 8).to(torch.float32) - _dither(words)) * self._unit(scale)
        return torch.where(scale == NAN_SCALE, math.nan, torch.where(wide == 0, 0.0, values))


def _dither(words: Tensor | None) -> Tensor | float:
    """Return odd multiples of 2^-17 in (-1/2, 1/2), from the top 16 bits; q less such a d is exact."""
    if words is None:
        return 0.0
    odd = ((words >> 15) & 0x1FFFE) | 1
    return odd.to(torch.float32) * 2.0**-17 - 0.5
