"""Codes that are floats with a sign.

Contract: F3, F5.
"""

import torch
from torch import Tensor

from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.patterns import from_patterns, to_patterns
from halfstep_torch.numbers.rounding import round_number, round_to_patterns, round_value, rounded
from halfstep_torch.storage.base_codes import Codes


class _Floats(Codes):
    def to_wide(self, codes: Tensor) -> Tensor:
        """Undo the cast."""
        return codes.to(torch.float32)


class PlainCodes(_Floats):
    """Floats as they are, with no scale."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x, rounded."""
        return round_value(x, self.dtype, words, saturate=True)

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return x, rounded, twice: in eager mode nothing is decoded from a cast."""
        if torch.compiler.is_compiling():
            return super().round_trip(x, words, nonzero)
        number = round_number(x, self.dtype, words, saturate=True)
        return number, number

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers themselves."""
        return wide


class SignedCodes(_Floats):
    """Floats with a sign and a scale."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x / 2^s, rounded."""
        assert scale is not None
        # Powers of two within the normal numbers of float32, both ways: the product is exact.
        y = x * ((254 + self.exponent - scale) << 23).view(torch.float32)
        codes = rounded(y, self.numbers, words, saturate=True)
        if nonzero is False:
            return codes
        return torch.where((x > 0) & (codes == 0) & nonzero, self.numbers.smallest, codes)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return codes times 2^s."""
        assert scale is not None
        return wide * XP.unit(scale, self.exponent)


class PatternCodes(SignedCodes):
    """Floats for which torch has no dtype: their patterns."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the patterns of x / 2^s, rounded."""
        return to_patterns(super().encode(x, scale, words, nonzero), self.numbers)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return the numbers of the patterns."""
        return from_patterns(codes.to(torch.int32), self.numbers)


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
