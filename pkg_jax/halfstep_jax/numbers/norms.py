"""Norms of whole arrays, in float32, which neither underflow nor overflow.

Contract: L1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.numbers.roots import sqrt

# Exponent fields between which both 2^e and 2^-e are normal numbers.
_LOWEST, _HIGHEST = 1, 253


def norm(x: jax.Array) -> jax.Array:
    """Return the Euclidean norm of an array: n = 2^e sqrt(sum((x 2^-e)^2)), e the exponent of max |x|.

    In float32, whatever the dtype of `x`. The two products with a power of two are exact, so that nothing
    underflows at 1e-20 or overflows at 1e20, where plain squares do. The sum is XLA's: rounded in an order of
    its own, and under sharding reduced across devices.

    Args:
        x: float32, bfloat16 or float16, of any shape.

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
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(x)), jnp.uint32)
    field = jnp.clip(largest >> np.uint32(23), np.uint32(_LOWEST), np.uint32(_HIGHEST))
    scaled = x * power_of_two(np.uint32(254) - field)
    return power_of_two(field) * sqrt(jnp.sum(scaled * scaled))


def power_of_two(field: jax.Array) -> jax.Array:
    """Return the float32 number of an exponent field, with no mantissa."""
    return lax.bitcast_convert_type(field << np.uint32(23), jnp.float32)
