"""Rounding from float32 to a narrower format, with random words from the caller.

Contract: section R. Every decision uses bit patterns in int32, so eager and compiled code decide alike on any
device. The cast at the end only gets representable values, infinity or NaN. The functions draw no random
numbers and do not depend on an optimizer.
"""

import math

import torch
from torch import Tensor

from halfstep.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep.rounding import check_round_to, code_of_magnitude, draw, multiple_of_smallest
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.exact import is_tame
from halfstep_torch.numbers.float_formats import dtype_name, torch_dtype

_MANTISSA_BITS = 23
# Patterns of float32.
_SIGN, _LARGEST, _INFINITY, _NAN = -(1 << 31), 0x7F7FFFFF, 0x7F800000, 0x7FC00000


def round_to(x: Tensor, dtype, words: Tensor | None = None, *, saturate: bool = False) -> Tensor:
    """Round float32 `x` to `dtype`, once (contract R1 to R7).

    Without words it rounds to nearest. With words it rounds up in magnitude if (word >> 16) + F is at least
    2^16. F is 2^16 times the discarded fraction of the last kept bit.

    Args:
        x: float32 tensor.
        dtype: a torch dtype or its name: float32 (which is not rounded), bfloat16, float16, float8_e4m3fn or
            float8_e5m2. Also "float8_e3m4", which is not a dtype of torch.
        words: words as from `random_words`, uint32 or int32 with the same pattern, or None for ties to even.
        saturate: whether to round to the largest number, as for state (R6), instead of infinity (R5).

    Returns:
        A tensor like `x` with `dtype`, or for "float8_e3m4" its patterns in uint8.

    Raises:
        TypeError: if `x` is not a float32 tensor, or `words` is not a tensor of words.
        ValueError: if `dtype` is not one of the six, or there is not a word for each element.

    Example:
        >>> words = torch.tensor([0, -(2**31), -1], dtype=torch.int32)
        >>> round_to(torch.full((3,), 1.0 + 2**-8), "bfloat16", words)
        tensor([1.0000, 1.0078, 1.0078], dtype=torch.bfloat16)

    Source: M. Croci et al., 2022, mode 1, by magnitude; see `halfstep.rounding`.
    """
    name = dtype_name(dtype)
    check_round_to(name, x, words, ("float32",), ("uint32", "int32"))
    if words is not None:
        words = words.view(torch.int32)
    return round_value(x, name, words, saturate)


def round_value(x: Tensor, name: str, words: Tensor | None, saturate: bool, quiet: bool = False) -> Tensor:
    """Round as `round_to` does, without checks and with `words` in int32, for update rules.

    Args:
        x: a float32 tensor.
        name: the name of the dtype.
        words: int32 words, or None.
        saturate: the rule for state.
        quiet: whether NaN in x is always quiet, as from arithmetic, so that fewer operations are needed.
    """
    if name == "float32":
        if not saturate:
            return x
        return x.clone() if is_tame(x) else torch.where(x.abs() < math.inf, x, math.nan)
    if name == "bfloat16":
        number = _round_tame(x, words) if is_tame(x) else _round_bfloat16(x, words, saturate, quiet)
        return number.to(torch.bfloat16)
    fmt, dtype = FLOAT_FORMATS[name], torch_dtype(name)
    value = rounded(x, fmt, words, saturate)
    return (value if dtype.is_floating_point else _patterns(value, fmt)).to(dtype)


def round_number(x: Tensor, name: str, words: Tensor | None, saturate: bool, quiet: bool = False) -> Tensor:
    """Return the result of `round_value`, in float32."""
    if name == "bfloat16" and is_tame(x):
        return _round_tame(x, words)
    return round_value(x, name, words, saturate, quiet).to(torch.float32)


def rounded(x: Tensor, fmt: FloatFormat, words: Tensor | None, saturate: bool) -> Tensor:
    """Return the result of `round_value` for a format of fewer exponent bits than float32, in float32."""
    if saturate:
        return torch.where(x.abs() < math.inf, _saturated(x, fmt, words), math.nan)
    value = _nearest(x, fmt) if words is None else _with_sign_of(x, _stochastic_magnitude(x, fmt, words))
    overflow = math.inf if fmt.has_infinity else math.nan
    value = torch.where(value.abs() <= fmt.max, value, overflow * value.sign())
    return torch.where(x == x, value, math.nan)


def _round_tame(x: Tensor, words: Tensor | None) -> Tensor:
    """Round tame numbers to float32 values of bfloat16, without a carry into the sign."""
    bits = x.view(torch.int32)
    sums = bits + (((bits >> 16) & 1) + 0x7FFF if words is None else draw(XP, words, 16))
    sums &= -0x10000
    return sums.view(torch.float32)


def _round_bfloat16(x: Tensor, words: Tensor | None, saturate: bool, quiet: bool) -> Tensor:
    """Round to a float32 number representable in bfloat16, in integer arithmetic only.

    bfloat16 is the upper half of float32. A sum below the cut carries correctly, also into the exponent, and
    from the largest finite value into infinity. It has no select or comparison, because in the compiled step
    each costs more than this arithmetic.
    """
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    addend = ((bits >> 16) & 1) + 0x7FFF if words is None else draw(XP, words, 16)
    if quiet and not saturate:
        # Infinity has nothing to carry, and a quiet NaN is cut to the least of its kind and does not carry.
        rounded = magnitude.clamp(max=_NAN) + addend
        return ((rounded & 0x7FFF0000) | (bits & _SIGN)).view(torch.float32)
    rounded = magnitude + addend
    if saturate:
        rounded = rounded.clamp(max=_LARGEST)
    # All ones if the result must be NaN, past infinity, or with `saturate` from infinity on.
    to_nan = ((_LARGEST if saturate else _INFINITY) - magnitude) >> 31
    return ((rounded & -0x10000) | (to_nan & _NAN) | (bits & _SIGN)).view(torch.float32)


def _saturated(x: Tensor, fmt: FloatFormat, words: Tensor | None) -> Tensor:
    """Return the rounded finite numbers, or the largest number of the format."""
    if words is None:
        return _nearest(x, fmt).clamp(-fmt.max, fmt.max)
    largest = (fmt.max_code + fmt.base) << (_MANTISSA_BITS - fmt.mantissa_bits)
    return _with_sign_of(x, _stochastic_magnitude(x, fmt, words).clamp(max=largest))


def _with_sign_of(x: Tensor, magnitude: Tensor) -> Tensor:
    return (magnitude | (x.view(torch.int32) & _SIGN)).view(torch.float32)


def _nearest(x: Tensor, fmt: FloatFormat) -> Tensor:
    bits, drop = x.view(torch.int32), _MANTISSA_BITS - fmt.mantissa_bits
    normal = ((bits + (((bits >> drop) & 1) + (1 << (drop - 1)) - 1)) & -(1 << drop)).view(torch.float32)
    # Of a float32 sum with this power of two the unit in the last place is the quantum of the subnormals.
    power = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits + _MANTISSA_BITS)
    subnormal = (x.abs() + power) - power
    subnormal = torch.where(bits < 0, -subnormal, subnormal)
    return torch.where(x.abs() < 2.0**fmt.min_exponent, subnormal, normal)


def _stochastic_magnitude(x: Tensor, fmt: FloatFormat, words: Tensor) -> Tensor:
    """Return the float32 patterns to which |x| rounds."""
    drop = _MANTISSA_BITS - fmt.mantissa_bits
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    normal = (magnitude + draw(XP, words, drop)) & -(1 << drop)
    subnormal = multiple_of_smallest(XP, magnitude, fmt, words).to(torch.float32) * fmt.smallest
    return torch.where(magnitude < fmt.first_normal, subnormal.view(torch.int32), normal)


def round_to_patterns(x: Tensor, fmt: FloatFormat, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the int32 patterns to which float32 `x` rounds as state, and their float32 numbers.

    It saturates, and infinity becomes NaN. Both results use the same parts, without decoding in between.

    Args:
        x: a float32 tensor.
        fmt: an 8-bit format with infinities.
        words: int32 words, or None for nearest, ties to even.
    """
    bits, drop = x.view(torch.int32), _MANTISSA_BITS - fmt.mantissa_bits
    magnitude = bits & 0x7FFFFFFF
    # Below the smallest normal number this is that, and multiples of the smallest number are taken off.
    normal = magnitude.clamp(min=fmt.first_normal)
    if words is None:
        normal = normal + (((normal >> drop) & 1) + ((1 << (drop - 1)) - 1))
    else:
        normal = normal + draw(XP, words, drop)
    normal = normal.clamp(max=((fmt.max_code + 1 + fmt.base) << drop) - 1)
    multiple = multiple_of_smallest(XP, magnitude, fmt, words)
    code = (normal >> drop) + (multiple - (fmt.base + (1 << fmt.mantissa_bits)))
    # From this power of two up the unit in the last place of float32 is the smallest number.
    exponent = fmt.min_exponent + drop
    shifted = (multiple + (fmt.first_normal + (drop << _MANTISSA_BITS))).view(torch.float32)
    off = shifted - (2.0**exponent + 2.0**fmt.min_exponent)
    number = (normal & -(1 << drop)).view(torch.float32) + off
    # All ones where x is not finite.
    not_finite = (_LARGEST - magnitude) >> 31
    code = ((code | ((bits >> 24) & 0x80)) & ~not_finite) | (fmt.nan_code & not_finite)
    number = number.view(torch.int32) | (not_finite & _NAN) | (bits & _SIGN)
    return code, number.view(torch.float32)


def from_patterns(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the float32 numbers of 8-bit patterns in int32, of a format with infinities."""
    drop = _MANTISSA_BITS - fmt.mantissa_bits
    # Their exponents at the upper end of float32's, so that infinity and NaN stay infinity and NaN.
    lowest = 255 - (0x7F >> fmt.mantissa_bits)
    high = ((codes << drop) & (0x7F << drop)) | (lowest << _MANTISSA_BITS)
    # Of a normal number this is the double, and of a subnormal one its sum with the smallest normal number.
    # The lesser result of both rules is right.
    double = high.view(torch.float32) * 2.0 ** (127 + fmt.min_exponent - lowest)
    subnormal = double - 2.0**fmt.min_exponent
    number = subnormal.view(torch.int32).minimum((double * 0.5).view(torch.int32))
    return (number | ((codes << 24) & _SIGN)).view(torch.float32)


def _patterns(value: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the patterns, int32, of results of `rounded`: of a format with infinities, or NaN."""
    code = code_of_magnitude(XP, value, fmt, None)
    code = torch.where(value.abs() <= fmt.max, code, fmt.max_code + 1)
    code = torch.where(value == value, code, fmt.nan_code)
    return code | ((value.view(torch.int32) >> 24) & 0x80)
