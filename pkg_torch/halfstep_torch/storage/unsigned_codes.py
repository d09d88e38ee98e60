"""Codes that are floats without a sign, for second moments.

Contract: F6.
"""

import math

import torch
from torch import Tensor

from halfstep.storage.unsigned_floats import NAN_CODE
from halfstep_torch.storage.base_codes import NAN_SCALE, Codes
from halfstep_torch.storage.unsigned_floats import decode_unsigned, encode_unsigned, round_unsigned

_NAN = 0x7FC00000


class UnsignedCodes(Codes):
    """Floats without a sign, of 8 bits."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return codes counted from the base of their block; only zero gets 0."""
        return encode_unsigned(x, words, self.numbers, self._base(scale))

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the codes, and the numbers, which rounding knows without them."""
        return round_unsigned(x, words, self.numbers, self._base(None))

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers from the base of their block up."""
        values = decode_unsigned(wide, self.numbers, self._base(scale))
        if scale is not None:
            return torch.where(scale == NAN_SCALE, math.nan, values)
        nan = ((NAN_CODE - 1 - wide) >> 31) & _NAN
        return (values.view(torch.int32) | nan).view(torch.float32)

    def _base(self, scale: Tensor | None):
        """Return what code 0 stands on: of every block, or one for all."""
        return self.numbers.base(scale) if scale is not None else self.numbers.fixed_base
