"""Seeds: a number in [0, 2^64), or two uint32 words. Contract: W2."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from halfstep import seeds

Seed = int | Sequence[int] | Tensor | np.ndarray
LinkSeed: TypeAlias = Any
"""Seed of a link, a number, None without its own words, or for `store_state` a pair (a list in JSON)."""


def as_seed(caller: str, seed: Seed) -> int:
    """Return `seed`, which may also be two words in a tensor or array, as one integer in [0, 2^64)."""
    return seeds.as_seed(caller, seed.tolist() if isinstance(seed, Tensor | np.ndarray) else seed)
