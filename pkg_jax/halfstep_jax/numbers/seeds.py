"""Seeds: a number in [0, 2^64), kept as two uint32 words.

Contract: W2. Raw words rather than a JAX key: every checkpoint library can hold them, and no setting of JAX
changes their meaning.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from halfstep.seeds import TWO_WORDS, as_seed
from halfstep_jax.leaf_calls import Tree

_LOG = logging.getLogger("halfstep_jax")


def seed_words(caller: str, seed) -> np.ndarray | jax.Array:
    """Return `seed` as uint32[2], (high, low): in NumPy, unless it is traced.

    It is an integer in [0, 2^64), two uint32 words, a key of `jax.random`, which has these, or a scalar
    integer array, as which `optax.inject_hyperparams` passes an integer on. A link keeps it for all its
    states, so it may be no buffer of a device: the first donated step would take that away, and under
    `jax.jit` it would be a tracer. `new_seed` makes the array of a state.

    Example:
        >>> seed_words("adamw", 2**32 + 5).tolist()
        [1, 5]
    """
    if isinstance(seed, jax.Array | np.ndarray):
        return _of_array(caller, seed)
    return np.array(divmod(as_seed(caller, seed), 2**32), np.uint32)


def new_seed(words: np.ndarray | jax.Array, *arrays: Tree) -> jax.Array:
    """Return the seed of a new state: an array of its own.

    `arrays` are the weights and the state's further arrays. If `jax.vmap` maps over them, and not over
    the seed, the members round with equal words: one warning.
    """
    leaves = jax.tree.leaves(arrays)
    if any(map(_is_mapped, leaves)) and not _is_mapped(words):
        if any(jnp.asarray(x).dtype.itemsize < 4 for x in leaves):  # Others are not rounded.
            _warn_of_equal_seeds()
    return jnp.array(words, copy=True)


def _is_mapped(x: object) -> bool:
    """Whether an array is a tracer of `jax.vmap`, which has no public name."""
    return isinstance(x, Tracer) and type(x).__name__ == "BatchTracer"


@functools.cache
def _warn_of_equal_seeds() -> None:
    _LOG.warning(
        "init in jax.vmap: all members get the same seed, so their rounding errors correlate, and a mean of "
        "members keeps most of them. Give each member its own seed: jax.vmap(lambda p, seed: "
        "adamw(1e-3, seed=seed).init(p))(params, jax.random.split(jax.random.key(0), n))."
    )


def _of_array(caller: str, seed) -> np.ndarray | jax.Array:
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.shape == ():
        seed = jax.random.key_data(seed)
        if seed.shape != (2,):
            raise TypeError(
                f"{caller}: seed is a key of {seed.size} words. Use an integer in [0, 2^64), such as the "
                "number that the key was made of, or a key of threefry2x32."
            )
    if seed.shape == (2,) and seed.dtype == jnp.uint32:
        return seed if isinstance(seed, Tracer) else np.array(seed)
    if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"{caller}: seed is {seed.dtype} of shape {seed.shape}. "
            f"Use an integer in [0, 2^64), or {TWO_WORDS}."
        )
    if not isinstance(seed, Tracer):
        return seed_words(caller, int(seed))
    low = seed.astype(jnp.uint32)
    high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8 else jnp.zeros_like(low)
    return jnp.stack([high, low])
