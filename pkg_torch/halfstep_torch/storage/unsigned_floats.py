"""Unsigned 8-bit floats for second moments: no sign, no subnormal numbers, zero for zero alone.

Contract: F6. Vectors: formats. Code 0 is zero; code c > 0 is float32's own pattern, cut to M mantissa
bits and counted from `base`: (c + base) << (23 - M). So rounding is an integer sum and a shift.
"""

import torch
from torch import Tensor

from halfstep.storage.unsigned_floats import NAN_CODE, UnsignedFloat
from halfstep_torch.numbers.rounding import draw

_INFINITY, _NAN = 0x7F800000, 0x7FC00000


def encode_unsigned(x: Tensor, words: Tensor | None, fmt: UnsignedFloat, base) -> Tensor:
    """Round non-negative float32 `x` to codes: add the word or one half, cut the pattern, clamp.

    Args:
        x: float32, not negative; NaN and infinity get the code 255, if the base is no higher than that of a
            scale.
        words: int32 words, or None for nearest, ties to even.
        fmt: the format.
        base: int32, one for all or of a shape that broadcasts with x.

    Returns:
        int32 codes.
    """
    total, least = _uncut(x, words, fmt)
    return ((total >> 23 - fmt.mantissa_bits) - base).maximum(least).clamp(max=255)


def round_unsigned(x: Tensor, words: Tensor | None, fmt: UnsignedFloat, base: int) -> tuple[Tensor, Tensor]:
    """Return the codes of `encode_unsigned`, and the float32 numbers that they are; the base is fixed.

    Both come from the same sum, without a decoding between.
    """
    drop = 23 - fmt.mantissa_bits
    total, least = _uncut(x, words, fmt)
    codes = ((total >> drop) - base).maximum(least).clamp(max=255)
    number = (total & -(1 << drop)).maximum(-least & (base + 1 << drop))
    nan = ((NAN_CODE + base << drop) - 1 - total >> 31) & _NAN
    return codes, (number | nan).view(torch.float32)


def _uncut(x: Tensor, words: Tensor | None, fmt: UnsignedFloat) -> tuple[Tensor, Tensor]:
    """Return the patterns to be cut to M mantissa bits, and the least codes: zero alone is less than one."""
    drop = 23 - fmt.mantissa_bits
    # NaN, of either sign, is past the largest number, as infinity is.
    bits = (x.view(torch.int32) & 0x7FFFFFFF).clamp(max=_INFINITY)
    if words is None:
        add = (1 << (drop - 1)) - 1 + (bits >> drop & 1)
    else:
        add = draw(words, drop) + _root_term(bits, fmt)
    return bits + add, bits.clamp(max=1)


def _root_term(bits: Tensor, fmt: UnsignedFloat) -> Tensor:
    """Return what rounding adds so that it keeps the mean of x^(1/4), and not of x.

    A step divides by the root of a second moment, so E[x^(-1/2)] must be right. Let f be the fraction that is
    cut off, and k 3/8 of the gap, divided by the number that is kept. The chance of the next number is
    f + k f (1 - f). Eleven bits of f are enough, and a straight line instead of 1 / mantissa (contract F6).
    """
    m, drop = fmt.mantissa_bits, 23 - fmt.mantissa_bits
    kept, cut = bits >> drop & (1 << m) - 1, bits >> (drop - 11) & 2047
    # Factors of two are taken out of 368 - (192 >> M) m, which so takes fewer instructions.
    return cut * (2047 - cut) * ((23 << m - 2) - 3 * kept) >> (3 + 3 * m)


def decode_unsigned(codes: Tensor, fmt: UnsignedFloat, base) -> Tensor:
    """Return the float32 values of int32 codes: exact."""
    bits = (codes + base) << (23 - fmt.mantissa_bits)
    return (bits & (-codes >> 31)).view(torch.float32)
