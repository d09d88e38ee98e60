"""Patterns of a float format that torch has no dtype for: float32 numbers of the format to codes, and back.

Contract: section R. Nothing is rounded here: `rounding.py` has made numbers of the format before.
"""

import math

import torch
from torch import Tensor

from halfstep_torch.numbers.float_formats import FloatFormat


def to_patterns(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the 8-bit patterns, in int32, of float32 numbers of the format, infinity or NaN.

    Args:
        x: float32, all of whose finite values the format holds.
        fmt: an 8-bit format with infinities.
    """
    bits, m = x.view(torch.int32), fmt.mantissa_bits
    normal = ((bits & 0x7FFFFFFF) >> (23 - m)) - _base(fmt)
    subnormal = (x.abs() * 2.0 ** (m - fmt.min_exponent)).to(torch.int32)
    code = torch.where(x.abs() < 2.0**fmt.min_exponent, subnormal, normal)
    code = torch.where(x.abs() <= fmt.largest, code, _infinity(fmt))
    code = torch.where(x == x, code, _infinity(fmt) + (1 << (m - 1)))
    return code | ((bits >> 24) & 0x80)


def from_patterns(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the float32 numbers of 8-bit patterns in int32."""
    code, m = codes & 0x7F, fmt.mantissa_bits
    normal = ((code + _base(fmt)) << (23 - m)).view(torch.float32)
    subnormal = code.to(torch.float32) * 2.0 ** (fmt.min_exponent - m)
    value = torch.where(code < 1 << m, subnormal, normal)
    past = torch.where(code == _infinity(fmt), math.inf, math.nan)
    value = torch.where(code < _infinity(fmt), value, past)
    return torch.where(codes >= 0x80, -value, value)


def _base(fmt: FloatFormat) -> int:
    """Return how far float32's patterns, cut to the format's mantissa, stand above its own."""
    return (127 + fmt.min_exponent - 1) << fmt.mantissa_bits


def _infinity(fmt: FloatFormat) -> int:
    """Return the pattern of infinity: of all exponent bits and no others."""
    return 0x7F >> fmt.mantissa_bits << fmt.mantissa_bits
