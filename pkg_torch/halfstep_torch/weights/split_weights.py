"""A weight in two parts: the model's, in 16 bits, and further bits of its mantissa. Contract: P5.

Together they are a number of a wider format: the weight's format with 8 or 16 more bits of mantissa. The
pattern of the wide number is the pattern of the weight, moved up, plus the low bits as a signed number. The
weight is the *nearest*, so it may stand above.
"""

import dataclasses
import math

import torch
from torch import Tensor

from halfstep.float_formats import FloatFormat
from halfstep_torch.numbers.rounding import round_narrow, round_number

_TOP = -(1 << 31)
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


def nearest_away(w: Tensor, dtype: str) -> Tensor:
    """Return float32 `w` rounded to nearest, ties away from zero, still in float32."""
    # A word of one half carries exactly where half or more is discarded.
    half = torch.full((), _TOP, dtype=torch.int32, device=w.device)
    return round_number(w, dtype, half, saturate=False)


@dataclasses.dataclass(frozen=True)
class SplitWeight:
    """How many bits a weight, bfloat16 or float16, and what is kept beside it, 8 or 16, have."""

    dtype: str
    extra_bits: int

    @property
    def extra_dtype(self) -> torch.dtype:
        """The dtype of the low bits; int16 where uint16 is meant, of which torch knows little."""
        return torch.uint8 if self.extra_bits == 8 else torch.int16

    @property
    def rounds(self) -> bool:
        """Whether there are float32 weights that both parts together cannot hold."""
        return (self.dtype, self.extra_bits) != ("bfloat16", 16)

    def join(self, p: Tensor, extra: Tensor) -> Tensor:
        """Return the float32 weights; of fp16 and 16 bits, rounded to nearest float32."""
        k = self.extra_bits
        low = extra.to(torch.int32)
        low = low if k == 16 else low - ((low & 0x80) << 1)
        bits = p.view(torch.int32)
        if self.dtype == "bfloat16":
            joined = ((bits & ~_TOP) + (low << (16 - k))).view(torch.float32)
        else:
            joined = _from_code((_to_code(p.abs(), 10) << k) + low, 10 + k)
        return torch.where(bits < 0, -joined, joined)

    def split(self, w: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the model's weights, in float32, and the low bits, in int32: numbers of `extra_dtype`.

        Rounds to the wider format, by `words` or to nearest, ties to even; then the weight to nearest, ties
        away from zero.
        """
        k, bits = self.extra_bits, w.view(torch.int32)
        if self.dtype == "bfloat16":
            magnitude = torch.where(w == w, bits & ~_TOP, _NAN)
            if k == 8:
                add = 0x7F + (magnitude >> 8 & 1) if words is None else words >> 24 & 0xFF
                magnitude = torch.where(magnitude < _INFINITY, magnitude + add, magnitude) & ~0xFF
            shown = ((magnitude + 0x8000) & ~0xFFFF).view(torch.float32)
            extra = magnitude >> (16 - k)
        else:
            code = _to_code(_round_half(w.abs(), 10 + k, words), 10 + k)
            shown = _from_code((code + (1 << (k - 1))) >> k, 10)
            extra = code
        # Cut to k bits by hand: what a cast makes of numbers out of range is the machine's own business.
        extra = extra & ((1 << k) - 1)
        extra = extra if k == 8 else extra - ((extra & 0x8000) << 1)
        return torch.where(bits < 0, -shown, shown), extra


# float16 and its wider kin: 5 bits of exponent, m of mantissa.


def _round_half(x: Tensor, m: int, words: Tensor | None) -> Tensor:
    """Round non-negative float32 to m bits of mantissa, as float16 does; past its range comes infinity."""
    rounded = round_narrow(x, FloatFormat("float16", m, -14, 65504.0), words)
    # Of 26 bits, only numbers below 2^-17 have more mantissa than fits.
    rounded = rounded if m < 23 else torch.where(x < 2.0**-17, rounded, x)
    rounded = torch.where(rounded < 65536.0, rounded, math.inf)
    return torch.where(x == x, rounded, math.nan)


def _to_code(x: Tensor, m: int) -> Tensor:
    """Return the patterns, in int32, of non-negative numbers that the format holds."""
    normal = x.view(torch.int32) - (112 << 23)
    normal = normal >> (23 - m) if m < 23 else normal << (m - 23)
    code = torch.where(x < 2.0**-14, (x * 2.0 ** (14 + m)).to(torch.int32), normal)
    code = torch.where(x < 65536.0, code, 31 << m)
    return torch.where(x == x, code, (31 << m) + (1 << (m - 1)))


def _from_code(code: Tensor, m: int) -> Tensor:
    """Return the float32 values of patterns of non-negative numbers; of 26 bits, to nearest."""
    field, low = code >> m, code & ((1 << m) - 1)
    significand = torch.where(field > 0, low + (1 << m), low).to(torch.float32)
    unit = ((field.clamp(min=1) + (127 - 15 - m)) << 23).view(torch.float32)
    past = torch.where(low == 0, math.inf, math.nan)
    return torch.where(field < 31, significand * unit, past)
