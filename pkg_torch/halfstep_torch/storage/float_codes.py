"""Codes that are floats.

Contract: F3, F5, F21.
"""

import torch
from torch import Tensor

from halfstep.storage.unsigned_halves import UnsignedHalfCodes as SharedHalfCodes
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.rounding import (
    from_patterns,
    round_number,
    round_to_patterns,
    round_value,
    rounded,
)
from halfstep_torch.storage.base_codes import Codes


class _Floats(Codes):
    """Floats that a cast encodes and decodes."""

    def to_wide(self, codes: Tensor) -> Tensor:
        """Undo the cast."""
        return codes.to(torch.float32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers themselves or, in a format with a scale, times 2^s."""
        return wide if scale is None else wide * XP.unit(scale, self.exponent)


class PlainCodes(_Floats):
    """Floats without a scale."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x, rounded."""
        return round_value(x, self.dtype, words, saturate=True)

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the rounded x as codes and as values, without decoding the codes."""
        number = round_number(x, self.dtype, words, saturate=True)
        return number, number


class SignedCodes(_Floats):
    """Floats with a scale."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x / 2^s, rounded."""
        assert scale is not None
        # Powers of two within the normal numbers of float32, both ways: the product is exact.
        y = x * ((254 + self.exponent - scale) << 23).view(torch.float32)
        codes = rounded(y, self.numbers, words, saturate=True)
        if nonzero is False:
            return codes
        return torch.where((x > 0) & (codes == 0) & nonzero, self.numbers.smallest, codes)


class PatternCodes(_Floats):
    """Floats with a scale for which torch has no dtype, stored as patterns."""

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return the numbers of the patterns."""
        return from_patterns(codes.to(torch.int32), self.numbers)


class FixedCodes(PatternCodes):
    """8-bit floats as patterns, without a scale: rounding also returns their numbers."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the patterns of x, rounded."""
        return round_to_patterns(x, self.numbers, words)[0]

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the patterns, and the numbers."""
        return round_to_patterns(x, self.numbers, words)


class UnsignedHalfCodes(Codes):
    """16-bit floats without a sign, kept in int16: rounding also returns their numbers."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the codes of x, rounded."""
        return self.round_trip(x, words, False)[0]

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the codes, and the numbers."""
        assert isinstance(self.shared, SharedHalfCodes)
        return self.shared.patterns(XP, x, words)
