"""Moments: exponential moving averages and their bias correction, in float32.

Contract: section M. How a moment is stored is not decided here (`formats.py` does).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.xla.exact import add_product, opaque_product, opaque_zero


def ema(
    average: jax.Array, value: jax.Array, b: jax.typing.ArrayLike, zero: jax.Array | None = None
) -> jax.Array:
    """Return (b average) + ((1 - b) value): two products and a sum, each rounded once (contract M1).

    `value` is opaque, if it comes from elsewhere (`exact.opaque_input`); `zero` is from `exact.opaque_zero`,
    where the caller has one.

    Example:
        >>> float(ema(jnp.float32(1.0), jnp.float32(3.0), 0.5))
        2.0
    """
    zero = opaque_zero() if zero is None else zero
    b = jnp.asarray(b, jnp.float32)
    return opaque_product(b, average, zero) + opaque_product(np.float32(1) - b, value, zero)


def bias_correction(b, count) -> jax.Array:
    """Return 1 - b^count in float32 by the complement binary power (contract M2); they broadcast.

    In float32 `1 - b**count` is off by 1.3e-5 at b = 0.999, count = 1.

    Example:
        >>> float(bias_correction(0.5, 2))
        0.75
    """
    return bias_correction_and_zero(b, count)[0]


def bias_correction_and_zero(b, count) -> tuple[jax.Array, jax.Array]:
    """Return `bias_correction`, and a zero of its loop for `exact.opaque`."""
    b, count = jnp.broadcast_arrays(jnp.asarray(b, jnp.float32), jnp.asarray(count).astype(jnp.uint32))
    # Rolled, or XLA would fuse two hundred scalar operations into every kernel that uses the result; eight
    # bits a turn, because on a GPU every turn is a kernel launch. Written out and without an index: of a loop
    # that JAX unrolls, XLA takes the counters apart one by one, each time going over the whole program.
    start = (jnp.zeros_like(b), np.float32(1) - b, count, opaque_zero())
    correction, *_, zero = lax.scan(_next_bits, start, None, length=4)[0]
    return correction, zero


def _next_bits(carry, _):
    """Take the lowest eight bits of the count into q; at module level, so that op by op it compiles once."""
    q, power, count, zero = carry
    for _ in range(8):
        q = jnp.where(count & np.uint32(1) == 1, add_product(q, power, np.float32(1) - q, zero), q)
        power, count = (power + power) - opaque_product(power, power, zero), count >> np.uint32(1)
    return (q, power, count, zero), None
