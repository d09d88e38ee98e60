"""Rounding between neighbours in tables. Contract: F8, F10."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage.tables import DECADES, SIZE, Table


def encode_table(y: jax.Array, words: jax.Array | None, table: Table) -> jax.Array:
    """Round float32 `y` to int32 codes, by int32 patterns of words or to nearest (contract F10).

    Example:
        >>> from halfstep.storage.tables import TABLES
        >>> codes = encode_table(jnp.array([0.0, 0.24, 0.26, 9.0]), None, TABLES["dynamic8"])
        >>> codes.tolist(), decode_table(codes, TABLES["dynamic8"]).tolist()
        ([0, 73, 75, 128], [0.0, 0.23359374701976776, 0.26171875, 1.0])
    """
    h = np.float32(0.5) if words is None else _fraction(words)
    return (_search(y, h, table) - table.zero) & (SIZE - 1)


def decode_table(codes: jax.Array, table: Table) -> jax.Array:
    """Return the float32 number of every code, int32: exact."""
    looked_up, computed = (functools.partial(f, table=table) for f in (_looked_up_by_code, _computed_by_code))
    return lax.platform_dependent(codes, cpu=looked_up, default=computed)


def _fraction(words: jax.Array) -> jax.Array:
    """Return odd multiples of 2^-17 in (0, 1). As none is 0, numbers next to zero round to zero."""
    odd = lax.shift_right_logical(words, np.int32(15)) | np.int32(1)
    return odd.astype(jnp.float32) * np.float32(2.0**-17)


def _search(y: jax.Array, h, table: Table) -> jax.Array:
    """Return the index that `y` rounds to: how many numbers it is rounded up from.

    Numbers are evenly spaced within a decade, so that arithmetic finds two gaps of which one holds `y`.
    """
    behind_zero = _position(jnp.abs(y), table)
    # That is right to 1e-4: y is in the gap at the floor of this, or in the next one.
    position = jnp.where(y < 0, -behind_zero, behind_zero) + np.float32(table.zero - 0.25)
    first = jnp.clip(jnp.floor(position), 0, SIZE - 2).astype(jnp.int32)
    between = _number(first + 1, table)
    in_next = y >= between
    other = _number(jnp.where(in_next, first + 2, first), table)
    low, high = jnp.minimum(between, other), jnp.maximum(between, other)
    return first + in_next.astype(jnp.int32) + (h * (high - low) < y - low).astype(jnp.int32)


def _position(magnitude: jax.Array, table: Table) -> jax.Array:
    """Return the positions of magnitudes in a dynamic map, counted from its zero, in float32.

    Between zero and the first number, where there is no decade, it is between 0.25 and 1.
    """
    n = 1 if table.signed else 2
    power, count = np.float32(10**DECADES), np.float32(n)
    for i in range(1, DECADES):
        in_later = magnitude >= np.float32(10.0 ** (i - DECADES))
        power = jnp.where(in_later, np.float32(10 ** (DECADES - i)), power)
        count = jnp.where(in_later, np.float32(n << i), count)
    # A decade of `count` numbers begins behind count - 1 others (signed) or count - 2.
    return count * ((magnitude * power + np.float32(8)) * np.float32(1 / 9)) - np.float32(n - 0.5)


def _number(index: jax.Array, table: Table) -> jax.Array:
    """Return the numbers of a dynamic map at positions, and infinity past its end."""
    looked_up, computed = (functools.partial(f, table=table) for f in (_looked_up, _computed))
    return lax.platform_dependent(index, cpu=looked_up, default=computed)


def _looked_up(index: jax.Array, table: Table) -> jax.Array:
    numbers = jnp.asarray(np.append(table.values, np.float32(np.inf)))
    return numbers.at[index].get(mode="promise_in_bounds")


def _looked_up_by_code(codes: jax.Array, table: Table) -> jax.Array:
    return jnp.asarray(table.by_code).at[codes].get(mode="promise_in_bounds")


def _computed_by_code(code: jax.Array, table: Table) -> jax.Array:
    if not table.signed:
        return _of_places(code, table)
    is_negative = code > _last(table)
    number = _of_places(jnp.where(is_negative, SIZE - code, code), table)
    return jnp.where(is_negative, -number, number)


def _computed(index: jax.Array, table: Table) -> jax.Array:
    """Do as `_looked_up`, to the bit, without a gather: on accelerators one is slow."""
    place = index - table.zero
    magnitude = jnp.abs(place)
    number = jnp.where(magnitude > _last(table), np.float32(np.inf), _of_places(magnitude, table))
    return jnp.where(place < 0, -number, number)


def _of_places(place: jax.Array, table: Table) -> jax.Array:
    """Return the numbers at int32 positions of a dynamic map, from 0 to its end.

    Let the first decade have n numbers, and let the number be the k-th of N in its decade, from k = 0. The
    float (2 place + 2n - 1) / n has the decade in its exponent, from 1 up. Its mantissa is 1 + (k + 1/2) / N,
    so 1 + 9 (k + 1/2) / N is exact. It stays exact after the powers of ten for the two low bits of the
    decade. The power of ten for the high bit, 10^-7 or 10^-3, is a sum of two numbers. The first product is
    rounded little or not at all. The second product is so small that the sum of both is the quotient, rounded
    once. This holds for all numbers of the tables, whether products and sum are fused or not.
    """
    n = 1 if table.signed else 2
    middle = place.astype(jnp.float32) * np.float32(2 / n) + np.float32((2 * n - 1) / n)
    bits = lax.bitcast_convert_type(middle, jnp.uint32)
    mantissa = (bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)
    numerator = np.float32(9) * lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(8)
    one, two, four = ((bits & np.uint32(1 << bit)) != 0 for bit in (23, 24, 25))
    ten, hundred = np.float32(10), np.float32(100)
    numerator *= jnp.where(one, ten, np.float32(1)) * jnp.where(two, hundred, np.float32(1))
    high, low = (jnp.where(four, *parts) for parts in zip(_power_of_ten(-3), _power_of_ten(-7), strict=True))
    # The number computed for the last one is past 1.
    number = jnp.minimum(numerator * high + numerator * low, np.float32(1))
    return jnp.where(place == 0, np.float32(0), number)


def _last(table: Table) -> int:
    """Return the position of 1."""
    return SIZE - 1 - table.zero


def _power_of_ten(exponent: int) -> tuple[np.float32, np.float32]:
    """Return a power of ten as the sum of two numbers, the first one of eight bits."""
    power = 10.0**exponent
    fraction, binary = math.frexp(power)
    high = math.ldexp(round(fraction * 2**8), binary - 8)
    return np.float32(high), np.float32(power - high)
