"""Norms of whole arrays, in float32, which neither underflow nor overflow.

Contract: L1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.op import LARGE_NORM, SCALE_BITS
from halfstep_jax.numbers.roots import sqrt
from halfstep_jax.xla.shards import manual_axes, varying

# Exponent fields between which both 2^e and 2^-e are normal numbers.
_LOWEST, _HIGHEST = 1, 253
# Elements that are at least added up at once where a norm is taken in pieces.
_PIECE = 128

AxisNames = Sequence[str] | None
"""Mesh axes over which arrays are cut inside `jax.shard_map`."""


class Norms(NamedTuple):
    """The norm of x, and the norm of 2^-64 x, which is finite where every element of x is."""

    whole: jax.Array
    moved: jax.Array

    @classmethod
    def of(cls, root: jax.Array, field: jax.Array) -> "Norms":
        """Return it of root 2^(field - 127); the field may be past the fields of float32."""
        moved = jnp.maximum(field, SCALE_BITS) - np.uint32(SCALE_BITS)
        return cls(power_of_two(jnp.minimum(field, np.uint32(255))) * root, power_of_two(moved) * root)

    def in_range(self) -> tuple[jax.Array, jax.Array]:
        """Return the norm of s x, and s: 1; 2^-64 where x is finite and its norm above 2^100."""
        is_large = (self.whole > np.float32(LARGE_NORM)) & (self.moved < np.float32(np.inf))
        scale = jnp.where(is_large, np.float32(2.0**-SCALE_BITS), np.float32(1))
        return jnp.where(is_large, self.moved, self.whole), scale


def norms(x: jax.Array, axis_names: AxisNames = ()) -> Norms:
    """Return the Euclidean norms of an array in float32, whatever its dtype (contract L1).

    The sum is XLA's: rounded in an order of its own, and under sharding reduced across devices.

    Example:
        >>> print(norms(jnp.array([3e-30, -4e-30])).whole)
        5e-30

    Source: the scaling is that of BLAS's `nrm2`, by a power of two.
    """
    x = jnp.asarray(x).astype(jnp.float32)
    if x.size == 0:
        return Norms(*jnp.zeros([2], jnp.float32))
    by_range = functools.partial(_squares_by_range, add_both=_sums)
    by_range_on_gpu = functools.partial(_squares_by_range, add_both=_complex_sums)
    total, field = lax.platform_dependent(x, cpu=_squares, tpu=by_range, default=by_range_on_gpu)
    if axes := cut_axes(x, axis_names):
        field_here, field = field, lax.pmax(field, axes)
        # Exact, or below a rounding error: 2^-63 of the largest does not count.
        apart = jnp.minimum(field - field_here, np.uint32(63))
        total = lax.psum(total * power_of_two(np.uint32(127) - apart - apart), axes)
    return Norms.of(sqrt(total), field)


def _squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return sum((x 2^-e)^2), and the exponent field 127 + e of the largest magnitude."""
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(x)), jnp.uint32)
    field = jnp.clip(largest >> np.uint32(23), np.uint32(_LOWEST), np.uint32(_HIGHEST))
    scaled = x * power_of_two(np.uint32(254) - field)
    return jnp.sum(scaled * scaled), field


def _squares_by_range(x: jax.Array, add_both: Callable) -> tuple[jax.Array, jax.Array]:
    """Do as `_squares` in one pass over memory, before the largest magnitude is known.

    Two sums are taken of each piece of the array, of some trailing axes. The first sum has the squares of
    numbers below 2^b, moved up by a power of two. The second sum has the other squares, moved down.
    `add_both` adds both. Both powers are chosen so that neither sum overflows in pieces of up to 2^20
    elements, and that a number from 2^-104 up counts in full. Smaller numbers concern A8. Then e is roughly
    the exponent of the largest norm of a piece.

    Not on a CPU, where each sum is a pass of its own.

    Source: ours; sums by range as in J. L. Blue, "A portable Fortran program to find the Euclidean
    norm of a vector", ACM TOMS 4(1), 1978.
    """
    x = x.reshape(1) if x.ndim == 0 else x
    count = 1
    while count < x.ndim and math.prod(x.shape[x.ndim - count :]) < _PIECE:
        count += 1
    bits = (math.prod(x.shape[x.ndim - count :]) - 1).bit_length()
    down = (130 + bits) // 2
    border = down - 63
    up = (127 - bits) // 2 - border
    is_large = jnp.abs(x) >= np.float32(2.0**border)
    moved = x * jnp.where(is_large, np.float32(2.0**-down), np.float32(2.0**up))
    squares, zero = moved * moved, np.float32(0)
    low, high = add_both(
        # NaN is not large.
        jnp.where(is_large, zero, squares),
        jnp.where(is_large, squares, zero),
        tuple(range(x.ndim - count, x.ndim)),
    )
    # From here on there are sums 4^exponent of each piece. The largest of them, about 4^top, becomes about 1.
    ranges = (low, -up), (high, down)
    top = jnp.max(jnp.stack([jnp.max(_half_exponent(sums) + exponent) for sums, exponent in ranges]))
    total = jnp.zeros([], jnp.float32)
    for sums, exponent in ranges:
        factor = power_of_two((127 + jnp.clip(exponent - top, -126, 64)).astype(jnp.uint32))
        total += jnp.sum(sums * factor * factor)
    return total, jnp.maximum(127 + top, _LOWEST).astype(jnp.uint32)


def _half_exponent(x: jax.Array) -> jax.Array:
    """Return e of numbers in [4^e, 4^(e + 1)), of zero one below all others."""
    field = lax.bitcast_convert_type(x, jnp.int32) >> 23
    return jnp.where(field == 0, -1000, (field - 127) >> 1)


def _sums(some: jax.Array, others: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(some, axes), jnp.sum(others, axes)


def _complex_sums(some: jax.Array, others: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Do as `_sums` by a single reduction: XLA on GPUs makes a pass over memory for each."""
    both = jnp.sum(lax.complex(some, others), axes)
    return lax.real(both), lax.imag(both)


def check_axis_names(caller: str, axis_names: AxisNames) -> None:
    """Refuse a norm inside `jax.shard_map` without the mesh axes of the shards."""
    manual = manual_axes()
    if manual and axis_names is None:
        raise ValueError(
            f"{caller}: inside jax.shard_map over {manual} a norm would be the norm of a shard. Pass "
            "axis_names=: the axes over which the arrays are cut, or () where every device has them whole."
        )


def cut_axes(x: jax.Array, axis_names: AxisNames) -> tuple[str, ...]:
    """Return the given mesh axes over which an array is cut.

    Outside `jax.shard_map` none: there an array is whole, wherever its parts lie. Inside, an array may differ
    from the others: JAX knows over which axes it varies, unless it was told not to (`check_vma=False`).
    """
    names = tuple(name for name in axis_names or () if name in manual_axes())
    if names and varying(lax.axis_index(names)):
        return tuple(name for name in names if name in varying(x))
    return names


def over_axes(reduce: Callable, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return a reduction over mesh axes, if there are any."""
    return reduce(x, axes) if axes else x


def power_of_two(field: jax.Array) -> jax.Array:
    """Return the float32 number of an exponent field, with no mantissa."""
    return lax.bitcast_convert_type(field << np.uint32(23), jnp.float32)
