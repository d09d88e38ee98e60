"""Norms of whole arrays, in float32, which neither underflow nor overflow.

Contract: L1.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.numbers.roots import sqrt
from halfstep_jax.numbers.shards import manual_axes, varying

# Exponent fields between which both 2^e and 2^-e are normal numbers.
_LOWEST, _HIGHEST = 1, 253


AxisNames = Sequence[str] | None
"""Mesh axes over which arrays are cut inside `jax.shard_map`."""


def norm(x: jax.Array, axis_names: AxisNames = ()) -> jax.Array:
    """Return the Euclidean norm of an array: n = 2^e sqrt(sum((x 2^-e)^2)), e the exponent of max |x|.

    In float32, whatever the dtype of `x`. The two products with a power of two are exact, so that nothing
    underflows at 1e-20 or overflows at 1e20, where plain squares do. The sum is XLA's: rounded in an order of
    its own, and under sharding reduced across devices.

    Args:
        x: float32, bfloat16 or float16, of any shape.
        axis_names: see `cut_axes`.

    Returns:
        A float32 scalar: 0 of an array that is empty or all zeros, NaN where an element is NaN, infinity
        where one is infinite.

    Example:
        >>> print(norm(jnp.array([3e-30, -4e-30])))
        5e-30

    Source: ours; the scaling is that of BLAS's `nrm2`, by a power of two (contract L1).
    """
    x = jnp.asarray(x).astype(jnp.float32)
    if x.size == 0:
        return jnp.zeros([], jnp.float32)
    axes = cut_axes(x, axis_names)
    largest = lax.bitcast_convert_type(over_axes(lax.pmax, jnp.max(jnp.abs(x)), axes), jnp.uint32)
    field = jnp.clip(largest >> np.uint32(23), np.uint32(_LOWEST), np.uint32(_HIGHEST))
    scaled = x * power_of_two(np.uint32(254) - field)
    return power_of_two(field) * sqrt(over_axes(lax.psum, jnp.sum(scaled * scaled), axes))


def check_axis_names(caller: str, axis_names: AxisNames) -> None:
    """Refuse a norm inside `jax.shard_map` that was not told how arrays are cut.

    Raises:
        ValueError: naming the axes.
    """
    manual = manual_axes()
    if manual and axis_names is None:
        raise ValueError(
            f"{caller}: inside jax.shard_map over {manual} a norm would be that of a shard. Pass "
            "axis_names=: the axes over which the arrays are cut, or () where every device has them whole."
        )


def cut_axes(x: jax.Array, axis_names: AxisNames) -> tuple[str, ...]:
    """Return the mesh axes over which an array is cut, of those given.

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
