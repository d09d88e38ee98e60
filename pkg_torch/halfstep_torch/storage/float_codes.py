"""Codes that are floats with a sign, and integers.

Contract: F3, F5.
"""

import dataclasses
import math

import torch
from torch import Tensor

from halfstep_torch.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_torch.numbers.patterns import from_patterns, to_patterns
from halfstep_torch.numbers.rounding import round_value, rounded
from halfstep_torch.storage.base_codes import NAN_SCALE, RoundTrip


@dataclasses.dataclass(frozen=True)
class PlainCodes(RoundTrip):
    """Floats as they are, with no scale.

    Attributes:
        name: "float32", "bfloat16" or "float16".
    """

    name: str
    signed = True
    packed = False
    nan_in_scale = False
    dithered = False
    scale_range = (0, 0)

    @property
    def for_second_moments(self) -> bool:
        """Squares go down to 1e-20: that takes the exponents of float32."""
        return self.name != "float16"

    @property
    def dtype(self) -> torch.dtype:
        """That of the name."""
        return getattr(torch, self.name)

    @property
    def half_gap(self) -> tuple[float, str]:
        """As of `SignedCodes`; float32 is taken as having none."""
        if self.name == "float32":
            return 0.0, "0"
        bits = FLOAT_FORMATS[self.name].mantissa_bits
        return 2.0 ** -(bits + 1), f"2^-{bits + 1}"

    def scale(self, block_max: Tensor) -> Tensor:
        """Not for these."""
        raise NotImplementedError

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x, rounded."""
        return round_value(x, self.name, words, saturate=True)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return float32."""
        return codes.to(torch.float32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers themselves."""
        return wide


@dataclasses.dataclass(frozen=True)
class SignedCodes(RoundTrip):
    """Floats with a sign and a scale, and integers.

    Attributes:
        format: of the codes; the integers are a float format whose every number is subnormal, with quantum 1.
        exponent: of the largest code.
        carry: what brings the pattern of a maximum past the largest code to the next exponent.
        lowest: the byte under which the smallest code would decode to a subnormal float32.
    """

    format: FloatFormat
    exponent: int
    carry: int
    lowest: int
    signed = True
    packed = False
    dithered = False

    @property
    def for_second_moments(self) -> bool:
        """Integers lift what is small by orders."""
        return not self.nan_in_scale

    @property
    def dtype(self) -> torch.dtype:
        """That of the format."""
        return self.format.dtype

    @property
    def half_gap(self) -> tuple[float, str]:
        """2^-(p + 1) for p explicit mantissa bits; 1/254 for int8: that below its largest code."""
        if self.nan_in_scale:
            return 1 / 254, "1/254"
        return 2.0 ** -(self.format.mantissa_bits + 1), f"2^-{self.format.mantissa_bits + 1}"

    @property
    def nan_in_scale(self) -> bool:
        """Integers have no NaN."""
        return not self.dtype.is_floating_point

    @property
    def scale_range(self) -> tuple[int, int]:
        """No decoded value is subnormal in float32, and none is infinite."""
        return self.lowest, 254

    def scale(self, block_max: Tensor) -> Tensor:
        """Return (bits(block_max) + c) >> 23: the smallest power of two under which `block_max` fits."""
        return (block_max.view(torch.int32) + self.carry >> 23).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x / 2^s, rounded."""
        assert scale is not None
        # Powers of two within the normal numbers of float32, both ways: the product is exact.
        y = x * ((254 + self.exponent - scale) << 23).view(torch.float32)
        codes = rounded(y, self.format, words, saturate=True)
        if nonzero is False:
            return codes
        smallest = 2.0 ** (self.format.min_exponent - self.format.mantissa_bits)
        return torch.where((x > 0) & (codes == 0) & nonzero, smallest, codes)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return float32."""
        return codes.to(torch.float32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return codes times 2^s."""
        assert scale is not None
        unit = ((scale - self.exponent) << 23).view(torch.float32)
        return wide * torch.where(scale == NAN_SCALE, math.nan, unit)


class PatternCodes(SignedCodes):
    """Floats for which torch has no dtype: their patterns."""

    @property
    def nan_in_scale(self) -> bool:
        """Patterns have a NaN."""
        return False

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the patterns of x / 2^s, rounded."""
        return to_patterns(super().encode(x, scale, words, nonzero), self.format)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return the numbers of the patterns."""
        return from_patterns(codes.to(torch.int32), self.format)


INT8 = FloatFormat(torch.int8, 7, 7, 127.0, math.nan)
"""The integers as a float format whose every number is subnormal, with quantum 1: one rounding serves all."""
