"""Rounding from float32 to a narrower format, the random words given by the caller.

Contract: section R. Nothing here draws random numbers, and nothing here depends on an optimizer.
Everything is decided on the bit patterns of float32; the cast at the end meets only values that the target
represents, and decides nothing. It is a cast, and not a bitcast of shifted patterns. XLA on CPU treats a cast
to bfloat16 as expensive, and so computes a stored moment once. It computes a value that ends in a bitcast
anew wherever the value is used.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.did_you_mean import listed
from halfstep.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep.rounding import ROUNDING_TARGETS, check_round_to, draw, multiple_of_smallest
from halfstep_jax.leaf_calls import call_per_shape
from halfstep_jax.numbers.arrays import JaxArrays, as_int32
from halfstep_jax.xla.exact import straight_through

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)
_QUIET = np.uint32(0x00400000)
_ONE = np.uint32(1)
_MANTISSA_BITS = 23
_SOURCES = ("float32", "bfloat16", "float16")
_EXPONENT_BIAS = 127


def round_to(
    x: jax.typing.ArrayLike,
    dtype: jax.typing.DTypeLike,
    words: jax.typing.ArrayLike | None = None,
    *,
    saturate: bool = False,
) -> jax.Array:
    """Round float32 `x` to `dtype`, once: to nearest, or as words say (contract R1 to R7).

    With F the discarded fraction of the last bit that is kept, in units of 2^-16, stochastic rounding goes
    up if F + (word >> 16) >= 2^16. Derivatives pass straight through.

    Args:
        x: float32, or bfloat16 or float16, which float32 holds.
        dtype: "float32" (nothing is rounded), "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2" or
            "float8_e3m4", by name or as a dtype.
        words: uint32, one per element, of which the top 16 bits are read; or None for nearest, ties to even.
        saturate: True for states (contract R6), False for parameters (R5).

    Returns:
        An array of `dtype` in the shape of `x`.

    Raises:
        TypeError: if `x` is of another dtype, or `words` is not uint32.
        ValueError: if `dtype` is not a target, or `words` has another shape than `x`.

    Example:
        >>> x = jnp.float32(1.001)
        >>> print(round_to(x, "bfloat16"), round_to(x, "bfloat16", words=jnp.uint32(0xFFFFFFFF)))
        1 1.00781

    Source: see `halfstep.rounding`.
    """
    name, words = _target(dtype), None if words is None else jnp.asarray(words)
    x = jnp.float32(x) if isinstance(x, float) else x
    check_round_to(name, x, words, _SOURCES, ("uint32",))
    return round_and_cast(jnp.asarray(x).astype(jnp.float32), name, words, saturate=saturate)


def round_in_float32(
    x: jax.Array, name: str, words: jax.Array | None, *, saturate: bool = False, quiet: bool = False
) -> jax.Array:
    """Return the values of `round_to` in float32, which holds them all.

    Args:
        x: float32.
        name: of the dtype.
        words: uint32, or None.
        saturate: the rule for states.
        quiet: whether a NaN in x is quiet, as arithmetic makes it: then fewer operations are enough.
    """
    return straight_through(x, call_per_shape(_round_in_float32, (name, saturate, quiet), x, words))


def _round_in_float32(target: tuple[str, bool, bool], x: jax.Array, words: jax.Array | None) -> jax.Array:
    name, saturate, quiet = target
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & _MAGNITUDE
    is_nan = magnitude >= _INFINITY if saturate else magnitude > _INFINITY
    if name == "float32":
        return jnp.where(is_nan, np.float32(np.nan), x) if saturate else x
    fmt = FLOAT_FORMATS[name]
    if name == "bfloat16" and (quiet or saturate):
        # The sign stands above all that carries. In a state, a number past the largest number is cut to the
        # largest number, which already has the bit of a quiet NaN. With this bit, infinity becomes NaN.
        is_rounded = jnp.abs(x) <= np.float32(fmt.max) if saturate else x == x
        kept = bits | _QUIET if saturate else lax.full_like(bits, _NAN)
        result = jnp.where(is_rounded, _add_to_kept(bits, fmt, words), kept)
        return lax.bitcast_convert_type(result & _kept_mask(fmt), jnp.float32)
    result = _add_to_kept(magnitude, fmt, words)
    if fmt.min_exponent > 1 - _EXPONENT_BIAS:
        smallest_normal = np.float32(2.0**fmt.min_exponent).view(np.uint32)
        result = jnp.where(magnitude < smallest_normal, _round_subnormal(magnitude, fmt, words), result)
    result = lax.select(is_nan, lax.full_like(bits, _NAN), _bounded(result, fmt, saturate)) | (bits & _SIGN)
    # The mask comes last, where LLVM sees that a cast to come has nothing to round.
    return lax.bitcast_convert_type(result & _kept_mask(fmt), jnp.float32)


def round_and_cast(x: jax.Array, name: str, words: jax.Array | None, *, saturate: bool = False) -> jax.Array:
    """Return `round_to` of arguments that need no checks.

    The last operation decides whether XLA on CPU updates a donated moment in place. Where a later link reads
    the new moment, XLA either keeps it or computes it twice. If it computes it twice, it first copies the old
    moment. XLA keeps the result of a select, and of a cast to bfloat16, which it treats as expensive. It does
    not keep the result of a bitcast or of other casts.
    """
    rounded = round_in_float32(x, name, words, saturate=saturate)
    if name in ("float32", "bfloat16"):
        return rounded.astype(name)
    return jnp.where(jnp.isnan(rounded), np.array(np.nan, name), rounded.astype(name))


def _add_to_kept(magnitude: jax.Array, fmt: FloatFormat, words: jax.Array | None) -> jax.Array:
    """Add the rounding to the kept bits. A carry into the exponent is right, too."""
    drop = _MANTISSA_BITS - fmt.mantissa_bits
    if words is not None:
        return magnitude + draw(JaxArrays(), words, drop)
    odd = (magnitude >> np.uint32(drop)) & _ONE
    return magnitude + (np.uint32(2 ** (drop - 1) - 1) + odd)


def _round_subnormal(magnitude: jax.Array, fmt: FloatFormat, words: jax.Array | None) -> jax.Array:
    """Round patterns below the smallest normal number of `fmt` to a multiple of its smallest number."""
    multiple = multiple_of_smallest(JaxArrays(), as_int32(magnitude), fmt, as_int32(words))
    value = multiple.astype(jnp.float32) * np.float32(fmt.smallest)
    return lax.bitcast_convert_type(value, jnp.uint32)


def _bounded(result: jax.Array, fmt: FloatFormat, saturate: bool) -> jax.Array:
    """Apply the rules past the largest finite value: contract R6 for states, R5 for weights."""
    last = np.float32(fmt.max).view(np.uint32) | ~_kept_mask(fmt)
    if saturate:
        return jnp.minimum(result, last)
    if fmt.has_infinity and fmt.max > 2.0**127:
        return result  # the carry is the infinity of float32
    beyond = _INFINITY if fmt.has_infinity else _NAN
    return lax.select(result > last, lax.full_like(result, beyond), result)


def _kept_mask(fmt: FloatFormat) -> np.uint32:
    return np.uint32(2**32 - 2 ** (_MANTISSA_BITS - fmt.mantissa_bits))


def _target(dtype) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        use = f"Use {listed(ROUNDING_TARGETS)}."
        raise TypeError(f"round_to: dtype={dtype!r} is not a rounding target. {use}") from None
