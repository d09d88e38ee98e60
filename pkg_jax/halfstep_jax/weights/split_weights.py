"""A 16-bit weight and 8 or 16 further bits: together a number of a wider format. Integer arithmetic.

Contract: P5. The wider format is that of the weight with k more bits of mantissa: bfloat16 with 16 more is
float32 itself. The weight is the number rounded to nearest, ties away from zero: ties to even would give an
even weight 2^16 + 1 numbers to tell apart by 16 bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.float_formats import FLOAT_FORMATS, FloatFormat

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_ONE = np.uint32(1)
_MANTISSA_BITS = 23
_BIAS = 127
_ROOM = 3
"""Bits to the left of a float32 significand that float16 with 16 more bits of mantissa needs."""


def holds_float32(dtype, extra_bits: int) -> bool:
    """Whether the wider format is float32 itself, so that nothing is rounded."""
    return _has_exponents_of_float32(_format(dtype)) and extra_bits == 16


def join(p: jax.Array, extra: jax.Array) -> jax.Array:
    """Return the float32 values of weights and further bits; of float16 + 16 bits, the nearest float32.

    Example:
        >>> w = jnp.array([1 / 3, -1e-3, 0.0], jnp.float32)
        >>> p, extra = split(w, jnp.bfloat16, 16, None)
        >>> bool((join(p, extra) == w).all())
        True
    """
    fmt, k = _format(p.dtype), 8 * extra.dtype.itemsize
    bits = lax.bitcast_convert_type(p, jnp.uint16).astype(jnp.uint32)
    low = extra.astype(jnp.uint32)
    # A weight that was rounded up is one too far from zero; the top of the low bits says so.
    magnitude = (bits & np.uint32(0x7FFF)) - (low >> np.uint32(k - 1))
    magnitude = (magnitude << np.uint32(k)) | low
    if _has_exponents_of_float32(fmt):
        value = magnitude << np.uint32(16 - k)
    else:
        value = lax.bitcast_convert_type(_value(magnitude, fmt, fmt.mantissa_bits + k), jnp.uint32)
    return lax.bitcast_convert_type(value | (bits << np.uint32(16)) & _SIGN, jnp.float32)


def split(w: jax.Array, dtype, extra_bits: int, words: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the weights, bfloat16 or float16, and 8 or 16 further bits of float32 values.

    Rounds to the wider format, by `words` or to nearest, then the weight to nearest, ties away from zero.
    """
    fmt, k = _format(dtype), np.uint32(extra_bits)
    bits = lax.bitcast_convert_type(w, jnp.uint32)
    magnitude = bits & _MAGNITUDE
    if _has_exponents_of_float32(fmt):
        code = _cut(magnitude, 16 - extra_bits, words)
    else:
        code = _code(magnitude, fmt, fmt.mantissa_bits + extra_bits, words)
    infinity = np.uint32(_infinity(fmt) << extra_bits)
    nan = infinity | np.uint32(1 << (fmt.mantissa_bits + extra_bits - 1))
    code = jnp.where(magnitude < _INFINITY, jnp.minimum(code, infinity), infinity)
    code = jnp.where(magnitude > _INFINITY, nan, code)
    low = (code & np.uint32(2**extra_bits - 1)).astype(jnp.uint8 if extra_bits == 8 else jnp.uint16)
    # Read from what is stored: XLA on TPU fuses one result that reads another, not two that read a third.
    up = low.astype(jnp.uint32) >> (k - _ONE)
    shown = ((code >> k) + up) | ((bits & _SIGN) >> np.uint32(16))
    return lax.bitcast_convert_type(shown.astype(jnp.uint16), dtype), low


def _cut(magnitude: jax.Array, drop: int, words: jax.Array | None) -> jax.Array:
    """Round off the low `drop` bits of patterns."""
    if drop == 0:
        return magnitude
    if words is not None:
        return (magnitude + (words >> np.uint32(32 - drop))) >> np.uint32(drop)
    odd = (magnitude >> np.uint32(drop)) & _ONE
    return (magnitude + (np.uint32(2 ** (drop - 1) - 1) + odd)) >> np.uint32(drop)


def _code(magnitude: jax.Array, fmt: FloatFormat, mantissa_bits: int, words: jax.Array | None) -> jax.Array:
    """Round float32 patterns to patterns of `mantissa_bits` with the exponents of `fmt`."""
    # The infinity of `fmt`, as a float32 number, bounds what follows to 32 bits.
    magnitude = jnp.minimum(magnitude, np.float32(2.0 ** (2 - fmt.min_exponent)).view(np.uint32))
    field = magnitude >> np.uint32(_MANTISSA_BITS)
    significand = magnitude & np.uint32(2**_MANTISSA_BITS - 1)
    significand = jnp.where(field > 0, significand | np.uint32(2**_MANTISSA_BITS), significand)
    significand = significand << np.uint32(_ROOM)
    lowest = np.uint32(_BIAS + fmt.min_exponent)
    below = lowest - jnp.minimum(jnp.maximum(field, _ONE), lowest)
    drop = np.uint32(_MANTISSA_BITS + _ROOM - mantissa_bits) + below
    kept = significand >> jnp.minimum(drop, np.uint32(31))
    fraction = jnp.where(
        drop <= 32,
        significand << jnp.minimum(np.uint32(32) - drop, np.uint32(31)),
        significand >> jnp.minimum(drop - np.uint32(32), np.uint32(31)),
    )
    fraction = jnp.where(drop == 0, np.uint32(0), fraction)
    if words is None:
        half = np.uint32(0x80000000)
        up = (fraction > half) | ((fraction == half) & ((kept & _ONE) == _ONE))
    else:
        up = fraction + words < words
    base = (jnp.maximum(field, lowest) - lowest) << np.uint32(mantissa_bits)
    return base + kept + up.astype(jnp.uint32)


def _value(magnitude: jax.Array, fmt: FloatFormat, mantissa_bits: int) -> jax.Array:
    """Return the nearest float32 of patterns of `mantissa_bits` with the exponents of `fmt`."""
    field = magnitude >> np.uint32(mantissa_bits)
    significand = magnitude & np.uint32(2**mantissa_bits - 1)
    significand = jnp.where(field > 0, significand | np.uint32(2**mantissa_bits), significand)
    exponent = jnp.maximum(field, _ONE) + np.uint32(_BIAS + fmt.min_exponent - 1 - mantissa_bits)
    scale = lax.bitcast_convert_type(exponent << np.uint32(_MANTISSA_BITS), jnp.float32)
    # The conversion rounds, once, to nearest; the product is exact.
    value = significand.astype(jnp.int32).astype(jnp.float32) * scale
    infinity = np.uint32(_infinity(fmt) << (mantissa_bits - fmt.mantissa_bits))
    value = jnp.where(magnitude == infinity, np.float32(np.inf), value)
    return jnp.where(magnitude > infinity, np.float32(np.nan), value)


def _format(dtype) -> FloatFormat:
    return FLOAT_FORMATS[jnp.dtype(dtype).name]


def _has_exponents_of_float32(fmt: FloatFormat) -> bool:
    return fmt.min_exponent == 1 - _BIAS


def _infinity(fmt: FloatFormat) -> int:
    """Return the pattern of infinity of a 16-bit format: all ones in the exponent field."""
    return (2**15 - 1) >> fmt.mantissa_bits << fmt.mantissa_bits
