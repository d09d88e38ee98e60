"""What keeps a compiler from changing a rounding: no product fused with a sum, no factors gathered.

Contract: A1, A2. Under `jax.jit`, XLA on CPU turns `a * b + c` into a fused multiply-add, `(x * c1) * c2`
into `x * (c1 * c2)`, and `a / sqrt(b)` into `a * rsqrt(b)`; run op by op it does nothing of the kind, so the
bits would depend on how a step is compiled. `lax.optimization_barrier`, `lax.reduce_precision` and round
trips through integers do not stop it. An OR with a zero that no compiler can prove to be zero does, for one
instruction.

What to hide: a product that feeds a sum; an array that arrives from another link, which may be a product; a
constant that could vanish if it were seen.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def hidden_zero(word: jax.Array | None = None) -> jax.Array:
    """Return the uint32 zero (word (word + 1)) & 1: one of two neighbours is even, which no compiler proves.

    Args:
        word: uint32 scalar out of a rolled loop, such as a key of a leaf: what a loop computes is not
            folded even where all its inputs are constants. None makes a loop of its own for it.

    Source: ours.
    """
    word = _word_of_a_loop() if word is None else word
    return (word * (word + np.uint32(1))) & np.uint32(1)


def hide(x: jax.typing.ArrayLike, zero: jax.Array) -> jax.Array:
    """Return float32 `x` with its bits ORed with `zero`: the same value, of unknown origin.

    Not XORed: two links that hide one value with one zero would cancel each other.

    Args:
        x: float32.
        zero: from `hidden_zero`.

    Example:
        >>> float(hide(np.float32(0.3), hidden_zero())) == float(np.float32(0.3))
        True

    Source: ours.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) | zero, jnp.float32)


def arrived(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Return in float32 what another link or the caller gave, hidden.

    In 16 bits too: a product in bfloat16 that is then cast to float32 would not be rounded to bfloat16.

    Args:
        x: float32, bfloat16 or float16.
        zero: from `hidden_zero`.
    """
    if x.dtype == jnp.float32:
        return hide(x, zero)
    bits = lax.bitcast_convert_type(x, jnp.uint16) | zero.astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, x.dtype).astype(jnp.float32)


def _word_of_a_loop() -> jax.Array:
    """Return a word by two turns of a linear congruential generator; a single turn would be folded."""
    return lax.fori_loop(0, 2, _next_word, jnp.uint32(1))


def _next_word(_, word: jax.Array) -> jax.Array:
    return word * np.uint32(747796405) + np.uint32(2891336453)
