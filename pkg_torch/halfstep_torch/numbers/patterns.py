"""Patterns of a float format that torch has no dtype for: float32 to codes, and back.

Contract: section R. Nothing is rounded here. Decoding compares nothing: Inductor makes four instructions of a
comparison and its select, and one of a shift, a minimum or a maximum.
"""

import torch
from torch import Tensor

from halfstep.float_formats import FloatFormat

_SIGN = -(1 << 31)


def to_patterns(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the 8-bit patterns, in int32, of float32 numbers of a format with infinities, or NaN."""
    bits, m = x.view(torch.int32), fmt.mantissa_bits
    normal = ((bits & 0x7FFFFFFF) >> (23 - m)) - base(fmt)
    subnormal = (x.abs() * 2.0 ** (m - fmt.min_exponent)).to(torch.int32)
    code = torch.where(x.abs() < 2.0**fmt.min_exponent, subnormal, normal)
    code = torch.where(x.abs() <= fmt.max, code, infinity(fmt))
    code = torch.where(x == x, code, infinity(fmt) + (1 << (m - 1)))
    return code | ((bits >> 24) & 0x80)


def from_patterns(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the float32 numbers of 8-bit patterns in int32."""
    drop = 23 - fmt.mantissa_bits
    # Their exponents at the upper end of float32's, so that infinity and NaN are what they are there too.
    lowest = 255 - (0x7F >> fmt.mantissa_bits)
    high = ((codes << drop) & (0x7F << drop)) | (lowest << 23)
    # Of a normal number this is the double, and of a subnormal one its sum with the smallest normal number.
    # The lesser of what either rule gives is right.
    double = high.view(torch.float32) * 2.0 ** (127 + fmt.min_exponent - lowest)
    subnormal = double - 2.0**fmt.min_exponent
    number = subnormal.view(torch.int32).minimum((double * 0.5).view(torch.int32))
    return (number | ((codes << 24) & _SIGN)).view(torch.float32)


def base(fmt: FloatFormat) -> int:
    """Return how far float32's patterns, cut to the format's mantissa, stand above its own."""
    return (127 + fmt.min_exponent - 1) << fmt.mantissa_bits


def infinity(fmt: FloatFormat) -> int:
    """Return the pattern of infinity: of all exponent bits and no others."""
    return 0x7F >> fmt.mantissa_bits << fmt.mantissa_bits
