"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P. Vectors: params, adam.
"""

import numpy as np

from halfstep_spec.random_words import Role, random_words
from halfstep_spec.rounding import decode, round_to


def apply_updates(p: np.ndarray, u: np.ndarray, dtype: str) -> np.ndarray:
    """Return the patterns of nearest(p + u): the weight as it is stored, in every backend.

    Args:
        p: patterns of `dtype`.
        u: float32 update.
        dtype: "float32", "bfloat16" or "float16". Past the largest finite value comes infinity.
    """
    return round_to(decode(p, dtype) + u, dtype)


def round_stochastically(p: np.ndarray, u: np.ndarray, dtype: str, words: np.ndarray) -> np.ndarray:
    """Return the update that lands on p + u rounded stochastically to `dtype`.

    q = stochastic(p + u); the update is q - p in float32, and -0.0 where q = p, so that infinities and
    zeros of either sign stay what they are. float32 weights: u itself. Rounds p + u to float32, then that
    to `dtype`.

    Args:
        p: patterns of `dtype`.
        u: float32 update.
        dtype: of the weights.
        words: uint32, one per element (role PARAM).
    """
    if dtype == "float32":
        return u
    p32 = decode(p, dtype)
    q = decode(round_to(p32 + u, dtype, words), dtype)
    with np.errstate(invalid="ignore"):
        return np.where(q == p32, np.float32(-0.0), q - p32)


def param_words(seed: int, step: int, leaf: str, shape) -> np.ndarray:
    """Return the words that round a leaf's weights at `step` (1 at the first update)."""
    return random_words(seed, step, leaf, Role.PARAM, shape)
