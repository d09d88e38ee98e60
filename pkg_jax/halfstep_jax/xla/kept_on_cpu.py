"""Values that XLA on CPU stores between its kernels, instead of computing them again in each.

Values do not change: only memory and time differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.xla.exact import opaque_zero

_ONE = np.float32(1).view(np.uint32)


def keep_for_kernels(x: jax.Array) -> jax.Array:
    """Return float32 `x` divided by an opaque 1, which makes XLA on CPU store it for all kernels.

    XLA computes a cheap value anew in each of these kernels, with everything that leads to it. So it copies
    donated inputs that one kernel overwrites and another kernel reads. It treats a quotient as expensive, and
    keeps it. Not for other devices. A subnormal number may become zero.

    Example:
        >>> keep_for_kernels(jnp.array([0.5, -0.0, jnp.inf])).tolist()
        [0.5, -0.0, inf]

    Source: ours.
    """
    zero = opaque_zero(lax.bitcast_convert_type(x, jnp.uint32))
    return x / lax.bitcast_convert_type(zero | _ONE, jnp.float32)


def keep_codes_for_kernels(x: jax.Array) -> jax.Array:
    """Return codes through a loop without iterations, which makes XLA on CPU store them for all kernels.

    XLA fuses nothing across a loop. Codes of one byte are a quarter of the bytes of `keep_for_kernels`. The
    kernel that writes them has vectors twice as wide as a kernel that writes numbers of 16 or 32 bits.

    Example:
        >>> keep_codes_for_kernels(jnp.array([0, 200], jnp.uint8)).tolist()
        [0, 200]

    Source: ours.
    """
    return lax.while_loop(_turns, _turn, (opaque_zero(), x))[1]


def _turns(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
    return carry[0] != 0


def _turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    count, x = carry
    bits = lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)
    return count - np.uint32(1), lax.bitcast_convert_type(~bits, x.dtype)
