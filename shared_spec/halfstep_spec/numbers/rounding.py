"""Rounding from float32 to a narrower format, the random words given by the caller.

Contract: section R. Vectors: round_nearest, round_stochastic. Nothing here draws random numbers, and
nothing here depends on an optimizer.
"""

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS, FloatFormat

_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23


def round_to(
    x: np.ndarray, dtype: str, words: np.ndarray | None = None, *, saturate: bool = False
) -> np.ndarray:
    """Round float32 `x` to `dtype` and return the patterns of the result.

    Let s be the significand of x, and d the number of its low bits that `dtype` cannot hold. The magnitude of
    the result is (s >> d) + up, where

        nearest (`words` is None):  up = 1 if f exceeds one half, or equals it and s >> d is odd
        stochastic:                 up = 1 if F + (word >> 16) >= 2^16

    f is the discarded bits, as a fraction of the last bit that is kept. F is 2^16 f, rounded to an integer, a
    half upwards. Rounds once, here.

    Args:
        x: float32.
        dtype: one of `FLOAT_FORMATS`; in "float32" nothing is rounded.
        words: one uint32 per element, or None for nearest, ties to even.
        saturate: False, for parameters: values beyond the largest finite become infinity, or NaN where
            the format has none; infinity stays. True, for states: they become the largest finite value,
            and infinity becomes NaN.

    Returns:
        uint8, uint16 or uint32 patterns, in the shape of `x`.

    Source: M. Croci et al., "Stochastic rounding", R. Soc. Open Sci. 9(3), 2022. The carry form is ours.
    """
    return encode_float(x, FLOAT_FORMATS[dtype], words, saturate=saturate)


def encode_float(x: np.ndarray, fmt: FloatFormat, words: np.ndarray | None, *, saturate: bool) -> np.ndarray:
    """Round as `round_to` does, to any float format.

    Returns:
        Sign and magnitude, in the narrowest unsigned type that holds `fmt.bits`.
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    kept, code_base, discarded, drop = _split(bits, fmt)
    up = _up_nearest(kept, discarded, drop) if words is None else _up_stochastic(discarded, drop, words)
    code = code_base + kept + up
    code = np.minimum(code, fmt.max_code if saturate else fmt.overflow_code)
    code = np.where(np.isinf(x), fmt.nan_code if saturate else fmt.overflow_code, code)
    code = np.where(np.isnan(x), fmt.nan_code, code)
    sign = (bits >> 31).astype(np.uint64) << (fmt.bits - 1)
    return (code.astype(np.uint64) | sign).astype(fmt.code_dtype)


def decode(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float32 value of every code: exact, since float32 holds them all.

    Args:
        codes: unsigned patterns of `dtype`.
        dtype: as in `round_to`.
    """
    return decode_float(codes, FLOAT_FORMATS[dtype])


def decode_float(codes: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Return the float32 value of every code of a float format; of one wider than float32, the nearest."""
    codes = codes.astype(np.int64)
    sign, magnitude = codes >> (fmt.bits - 1), codes & ((1 << (fmt.bits - 1)) - 1)
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    significand = mantissa + ((exponent > 0).astype(np.int64) << fmt.mantissa_bits)
    finite = magnitude <= fmt.max_code
    scale = np.where(finite, np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits, 0)
    value = np.where(finite, np.ldexp(significand.astype(np.float64), scale), np.nan).astype(np.float32)
    if fmt.overflow_code != fmt.nan_code:
        value = np.where(magnitude == fmt.overflow_code, np.float32(np.inf), value)
    return np.where(sign == 1, -value, value).astype(np.float32)


def _split(bits: np.ndarray, fmt: FloatFormat):
    """Split the significand of float32 patterns at the last bit that `fmt` keeps.

    Returns:
        (kept bits, code of the exponent field below them, discarded bits, their number). A format with
        more mantissa bits than float32 keeps all of them, and zeros below.
    """
    magnitude = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)
    field = magnitude >> _MANTISSA_BITS
    significand = (magnitude & 0x7FFFFF) + np.where(field > 0, 1 << _MANTISSA_BITS, 0)
    exponent = np.maximum(field, 1) - _EXPONENT_BIAS
    smallest = 1 - fmt.bias
    drop = (_MANTISSA_BITS - fmt.mantissa_bits) + np.maximum(0, smallest - exponent)
    # 24 bits are all there are: past 62 every one is discarded and the fraction below 2^-32 anyway.
    drop = np.minimum(drop, 62)
    code_base = np.maximum(exponent - smallest, 0) << fmt.mantissa_bits
    left, drop = np.maximum(-drop, 0), np.maximum(drop, 0)
    kept = (significand << left) >> drop
    return kept, code_base, (significand << left) - (kept << drop), drop


def _up_nearest(kept: np.ndarray, discarded: np.ndarray, drop: np.ndarray) -> np.ndarray:
    half = (np.int64(1) << drop) / 2
    return ((discarded > half) | ((discarded == half) & (kept % 2 == 1))).astype(np.int64)


def _up_stochastic(discarded: np.ndarray, drop: np.ndarray, words: np.ndarray) -> np.ndarray:
    fraction = (discarded << 17 >> drop) + 1 >> 1
    return fraction + (np.asarray(words, np.uint32).astype(np.int64) >> 16) >> 16
