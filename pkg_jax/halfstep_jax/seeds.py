"""Seeds: a number in [0, 2^64), kept as two uint32 words.

Contract: W2. Raw words rather than a JAX key: every checkpoint library can hold them, and no setting changes them.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np


def seed_words(function: str, seed) -> jax.Array:
    """Return `seed` as uint32[2], (high, low).

    Args:
        function: whose argument it is, for the error.
        seed: an integer in [0, 2^64), a uint32[2] array, or an integer scalar array (which
            `optax.inject_hyperparams` makes of an integer).

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is out of range.
    """
    if isinstance(seed, jax.Array | np.ndarray):
        return _array_seed(function, seed)
    if isinstance(seed, bool | np.bool_):
        raise TypeError(_message(function, seed, "is not an integer"))
    try:
        value = operator.index(seed)
    except TypeError:
        raise TypeError(_message(function, seed, "is not an integer")) from None
    if not 0 <= value < 2**64:
        raise ValueError(_message(function, seed, "is outside [0, 2^64)"))
    return jnp.asarray(np.array([value >> 32, value & 0xFFFFFFFF], np.uint32))


def _array_seed(function, seed):
    if seed.shape == (2,) and seed.dtype == jnp.uint32:
        return jnp.asarray(seed)
    if seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        if not isinstance(seed, jax.core.Tracer):
            return seed_words(function, int(seed))
        low = seed.astype(jnp.uint32)
        return jnp.stack([jnp.zeros_like(low), low])
    raise TypeError(_message(function, f"{seed.dtype}{list(seed.shape)}", "is not a seed"))


def _message(function, seed, fault):
    return (
        f"{function}: seed={seed} {fault}. Use an integer in that range, or two uint32 words (high, low)."
        if "outside" in fault
        else f"{function}: seed={seed!r} {fault}. Use an integer in [0, 2^64), or two uint32 words (high, low)."
    )
