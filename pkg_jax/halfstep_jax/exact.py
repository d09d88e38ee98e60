"""What keeps a compiler from changing a rounding: each product rounded once, nothing reassociated.

Contract: A1, A2. XLA on CPU contracts `a * b + c` into a fused multiply-add and folds `(x * c1) * c2` into
`x * (c1 * c2)`; run op by op it does neither. `lax.optimization_barrier`, `lax.reduce_precision` and round trips
through integers do not stop it. The two functions here do, at one vector instruction or two per element.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def rounded(product: jax.Array) -> jax.Array:
    """Return `product` as it is, rounded once: no sum that follows can be fused with it.

    The select on NaN changes no value, and a multiplication under a select is not contracted. Only for a
    product that the caller has just formed: on an array that arrives from elsewhere it makes XLA on CPU write that
    array to memory. There, use `hide`.

    Source: ours.
    """
    return jnp.where(jnp.isnan(product), np.float32(np.nan), product)


def hidden_zero(word: jax.Array) -> jax.Array:
    """Return the uint32 zero (word (word + 1)) & 1, which a compiler does not know to be zero.

    Args:
        word: uint32 scalar that was computed in a rolled loop, such as a key word: what a loop computes is not
            folded even where all its inputs are constants.

    Source: ours.
    """
    return (word * (word + np.uint32(1))) & np.uint32(1)


def hide(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Return float32 `x` by way of an XOR of its bits with `zero`: the compiler loses sight of where x comes from.

    A constant cannot be folded through it, and a product that arrives cannot be fused with a sum.

    Args:
        x: float32.
        zero: from `hidden_zero`.

    Source: ours.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ zero, jnp.float32)
