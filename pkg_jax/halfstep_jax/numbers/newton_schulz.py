"""The Newton-Schulz factor of matrices, within a bound of the contract's: sums have XLA's order.

Contract: A14.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfstep.rules.muon import Matrices


def newton_schulz(
    x: jax.Array, matrices: Matrices, coefficients: Sequence[tuple], eps: float, dtype: str = "float32"
) -> jax.Array:
    """Return the factor (A14) of each matrix of a float32 array, in its shape; products are of `dtype`."""
    stack = jnp.transpose(x, matrices.order).reshape(matrices.stack)
    transposed = matrices.stack[1] > matrices.stack[2]
    stack = _normed(stack.mT if transposed else stack, eps).astype(dtype)
    for a, b, c in coefficients:
        gram = _product(stack, stack.mT)
        stack = a * stack + _product(b * gram + c * _product(gram, gram), stack)
    stack = (stack.mT if transposed else stack).astype(jnp.float32)
    return jnp.transpose(stack.reshape(matrices.moved), matrices.back)


def _normed(stack: jax.Array, eps: float) -> jax.Array:
    """Return matrices divided by their norms, scaled by their largest elements first: no square overflows."""
    top = jnp.abs(stack).max((1, 2), keepdims=True)
    scaled = stack / jnp.where(top > 0, top, 1)
    norm = jnp.sqrt(jnp.square(scaled).sum((1, 2), keepdims=True))
    return scaled / jnp.maximum(norm, eps / jnp.maximum(top, jnp.finfo(jnp.float32).tiny))


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    # By default TPUs round float32 factors to bfloat16, and GPUs to TF32, which the factor magnifies.
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
