"""Rounding from float32 to a narrower format, the random words given by the caller.

Contract: section R. Nothing here draws random numbers, and nothing here knows what an optimizer is. Everything is
decided on float32 bit patterns; the cast at the end meets only values that the target represents, so it decides nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.float_formats import FLOAT_FORMATS, FloatFormat

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)
_TARGETS = ("float32", *FLOAT_FORMATS)


def round_to(x, dtype, words=None, *, saturate: bool = False) -> jax.Array:
    """Round float32 `x` to `dtype`: once, here.

    With s the significand of x and d the number of its low bits that `dtype` cannot hold, the result is (s >> d) + up,
    in magnitude, where

        nearest (`words` is None):  up = 1 if the discarded bits are over one half, or just one half and s >> d odd
        stochastic:                 up = 1 if f + word >= 2^32, f = the discarded bits as a 32-bit fraction

    A value that `dtype` represents never moves. NaN stays NaN.

    Args:
        x: float32, or a dtype that float32 holds.
        dtype: "float32" (nothing is rounded), "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2", by name or as a dtype.
        words: uint32, in the shape of `x`, or None for nearest, ties to even.
        saturate: the rule for states. False (for parameters): past the largest finite value comes
            infinity, or NaN where the format has none; infinity stays what it is. True: the
            largest finite value, and infinity becomes NaN.

    Returns:
        An array of `dtype` in the shape of `x`.

    Source: M. Croci et al., "Stochastic rounding", R. Soc. Open Sci. 9(3), 2022, section 2, mode 1, by magnitude.
    The carry form is ours (contract R1 to R7).
    """
    name = jnp.dtype(dtype).name
    return round_in_float32(jnp.asarray(x, jnp.float32), name, words, saturate=saturate).astype(name)


def round_in_float32(x: jax.Array, name: str, words=None, *, saturate: bool = False) -> jax.Array:
    """Return the values of `round_to`, still in float32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & _MAGNITUDE
    if name == "float32":
        return jnp.where(magnitude == _INFINITY, np.float32(np.nan), x) if saturate else x
    fmt = FLOAT_FORMATS[name]
    result = _round_normal(magnitude, fmt, words)
    if fmt.min_exponent > -126:
        smallest = np.float32(2.0**fmt.min_exponent).view(np.uint32)
        result = jnp.where(magnitude < smallest, _round_subnormal(magnitude, fmt, words), result)
    result = _overflow(magnitude, result, fmt, saturate)
    return lax.bitcast_convert_type(result | (bits & _SIGN), jnp.float32)


def _overflow(magnitude, result, fmt: FloatFormat, saturate: bool):
    largest = np.float32(fmt.max).view(np.uint32)
    if saturate:
        return jnp.where(magnitude < _INFINITY, jnp.minimum(result, largest), _NAN)
    past = _INFINITY if fmt.has_infinity else _NAN
    result = jnp.where(result > largest, past, result)
    return jnp.where(magnitude > _INFINITY, _NAN, result)


def _round_normal(magnitude, fmt: FloatFormat, words):
    """Round patterns whose value is a normal number of `fmt`: a carry into the exponent is right as it is."""
    drop = 23 - fmt.mantissa_bits
    if words is None:
        odd = (magnitude >> np.uint32(drop)) & np.uint32(1)
        added = np.uint32((1 << (drop - 1)) - 1) + odd
    else:
        added = words >> np.uint32(32 - drop)
    return (magnitude + added) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)


def _round_subnormal(magnitude, fmt: FloatFormat, words):
    """Round patterns below the smallest normal number of `fmt`, to a multiple of its smallest number."""
    exponent_field = magnitude >> np.uint32(23)
    significand = (magnitude & np.uint32(0x7FFFFF)) | jnp.where(
        exponent_field > 0, np.uint32(1 << 23), np.uint32(0)
    )
    exponent = jnp.maximum(exponent_field, np.uint32(1))
    drop = np.uint32(23 - fmt.mantissa_bits + 127 + fmt.min_exponent) - exponent
    kept = significand >> jnp.minimum(drop, np.uint32(31))
    fraction = jnp.where(
        drop <= 32,
        significand << jnp.minimum(np.uint32(32) - drop, np.uint32(31)),
        significand >> jnp.minimum(drop - np.uint32(32), np.uint32(31)),
    )
    if words is None:
        half = np.uint32(1 << 31)
        up = (fraction > half) | ((fraction == half) & (kept & np.uint32(1) == 1))
    else:
        up = fraction + words < words
    unit = np.float32(2.0 ** (fmt.min_exponent - fmt.mantissa_bits))
    value = (kept + up.astype(jnp.uint32)).astype(jnp.int32).astype(jnp.float32) * unit
    return lax.bitcast_convert_type(value, jnp.uint32)
