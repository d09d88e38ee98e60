"""A norm over many arrays whose bits do not depend on the order of the sum, nor on how arrays are sharded.

Contract: C2. Magnitudes become integers of 24 bits, which are squared and added in uint32 without a
rounding: squares as three products of halves, sums as digits of 16 bits.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Exponent fields for which 2^(150 - e) and 2^(e - 150) are normal numbers.
_LOWEST, _HIGHEST = 24, 254
# So many terms below 2^24 and 2^16 add up to less than 2^32.
_CHUNK, _ROW = 2**7, 2**15
_DIGITS = 6


def exact_norm(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the Euclidean norm of all elements of `arrays`: 2^(e - 150) sqrt(sum(r^2)).

    e is the exponent field of max |x|, at least 24, and r = nearest(|x| 2^(150 - e)), an integer below 2^24.
    The sum is exact, of up to 2^38 elements. It becomes float32 by its digits to the base 2^16, from the
    highest of six down: s = (65536 s) + digit. So any order, any sharding and any backend gives the same
    bits. The error is under 1e-7 of the norm; elements below 2^-25 of the largest count as zero. It costs two
    reads of the arrays in place of one.

    Args:
        arrays: float32, bfloat16 or float16, of any shapes.

    Returns:
        A float32 scalar: 0 if there is nothing but zeros, NaN if an element is NaN, else infinity if one is
        infinite.

    Example:
        >>> print(exact_norm([jnp.array([3e-30]), jnp.array([-4e-30])]))
        5e-30

    Source: ours (contract C2).
    """
    magnitudes = [jnp.atleast_1d(jnp.abs(jnp.asarray(x).astype(jnp.float32))) for x in arrays]
    magnitudes = [x for x in magnitudes if x.size]
    if not magnitudes:
        return jnp.zeros([], jnp.float32)
    largest = jnp.max(jnp.stack([jnp.max(x) for x in magnitudes]))
    field = lax.bitcast_convert_type(largest, jnp.uint32) >> np.uint32(23)
    field = jnp.clip(field, np.uint32(_LOWEST), np.uint32(_HIGHEST))
    up = _power_of_two(np.uint32(277) - field)
    digits = _carried(functools.reduce(jnp.add, [_digits_of_squares(x * up) for x in magnitudes]))
    s = jnp.zeros([], jnp.float32)
    for i in reversed(range(_DIGITS)):
        # The product is exact, so that fusing it with the sum changes nothing.
        s = np.float32(65536) * s + digits[i].astype(jnp.float32)
    finite = largest < np.float32(np.inf)
    return jnp.where(finite, _power_of_two(field - np.uint32(23)) * jnp.sqrt(s), largest)


def _digits_of_squares(x: jax.Array) -> jax.Array:
    """Return sum(r^2), r = nearest(x), as six digits below 2^16: uint32[6].

    Args:
        x: float32, of one axis at least, below 2^24 after rounding; what is not finite gives some number.
    """
    r = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.uint32) & np.uint32(0xFFFFFF)
    a, b = r >> np.uint32(12), r & np.uint32(0xFFF)
    high, mixed, low = (_digits_of_sum(product) for product in (a * a, a * b, b * b))
    # 2^24 high + 2^13 mixed + low; every term is below 2^30.
    high, mixed = high << np.uint32(8), mixed << np.uint32(13)
    return jnp.pad(high, (1, 1)) + jnp.pad(mixed, (0, 2)) + jnp.pad(low, (0, 2))


def _digits_of_sum(x: jax.Array) -> jax.Array:
    """Return the sum of numbers below 2^24 as four digits below 2^16: uint32[4]."""
    # Along the last axis alone, so that an array that is sharded along others stays where it is.
    chunks = _in_rows(x, min(_CHUNK, x.shape[-1])).sum(-1, dtype=jnp.uint32).reshape(-1)
    low, high = (half.sum(-1, dtype=jnp.uint32) for half in _halves(_in_rows(chunks, min(_ROW, chunks.size))))
    (low_low, low_high), (high_low, high_high) = _halves(low), _halves(high)
    digits = (low_low, low_high + high_low, high_high)
    return _carried(jnp.stack([*(digit.sum(dtype=jnp.uint32) for digit in digits), np.uint32(0)]))


def _carried(digits: jax.Array) -> jax.Array:
    """Return the same number with digits below 2^16, the highest one apart."""
    carried, carry = [], np.uint32(0)
    for digit in digits[:-1]:
        # The carry may not fit beside the digit in 32 bits: halves are added.
        low, high = _halves(digit)
        low, carry_high = low + (carry & np.uint32(0xFFFF)), high + (carry >> np.uint32(16))
        carried.append(low & np.uint32(0xFFFF))
        carry = carry_high + (low >> np.uint32(16))
    return jnp.stack([*carried, digits[-1] + carry])


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the low and the high 16 bits."""
    return x & np.uint32(0xFFFF), x >> np.uint32(16)


def _in_rows(x: jax.Array, length: int) -> jax.Array:
    """Return the last axis as rows of `length`, filled up with zeros."""
    *leading, run = x.shape
    padded = jnp.pad(x, [(0, 0)] * len(leading) + [(0, -run % length)])
    return padded.reshape(*leading, -1, length)


def _power_of_two(field: jax.Array) -> jax.Array:
    """Return the float32 number of an exponent field, with no mantissa."""
    return lax.bitcast_convert_type(field << np.uint32(23), jnp.float32)
