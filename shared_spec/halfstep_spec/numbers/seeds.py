"""Seeds. Contract: W2."""

import numpy as np


def seed_words(seed: int):
    """Return a seed in [0, 2^64) as two uint32 words, (high, low)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed_words: seed={seed} is outside [0, 2^64). Use an integer in it.")
    return np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF)
