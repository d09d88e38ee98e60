"""Codes that are floats without a sign, for second moments.

Contract: F6.
"""

import dataclasses
import math

import torch
from torch import Tensor

from halfstep_torch.storage.base_codes import NAN_SCALE, RoundTrip
from halfstep_torch.storage.unsigned_floats import (
    NAN_CODE,
    UnsignedFloat,
    decode_unsigned,
    encode_unsigned,
    round_unsigned,
)

_NAN = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class UnsignedCodes(RoundTrip):
    """Floats without a sign, of 8 bits.

    Attributes:
        format: of the codes.
    """

    format: UnsignedFloat
    dtype = torch.uint8
    signed = False
    packed = False
    dithered = False
    for_second_moments = True

    @property
    def nan_in_scale(self) -> bool:
        """Where there is a scale, all codes are numbers."""
        return self.format.fixed is None

    @property
    def half_gap(self) -> tuple[float, str]:
        """2^-(M + 1)."""
        return 2.0 ** -(self.format.mantissa_bits + 1), f"2^-{self.format.mantissa_bits + 1}"

    @property
    def scale_range(self) -> tuple[int, int]:
        """All binades of a block are those of normal float32 numbers."""
        return 2**self.format.exponent_bits - 1, 253

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the exponent field of `block_max`: one binade of room is left above it."""
        return (block_max.view(torch.int32) >> 23).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return codes counted from the base of their block; only zero gets 0."""
        return encode_unsigned(x, words, self.format, self._base(scale))

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the codes, and the numbers, which rounding knows without them."""
        return round_unsigned(x, words, self.format, self._base(None))

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers from the base of their block up."""
        values = decode_unsigned(wide, self.format, self._base(scale))
        if scale is not None:
            return torch.where(scale == NAN_SCALE, math.nan, values)
        nan = ((NAN_CODE - 1 - wide) >> 31) & _NAN
        return (values.view(torch.int32) | nan).view(torch.float32)

    def _base(self, scale: Tensor | None):
        """Return what code 0 stands on: of every block, or one for all."""
        return self.format.base(scale) if scale is not None else self.format.fixed_base
