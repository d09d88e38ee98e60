"""Inputs from our own random words: never NumPy's distributions, which may change."""

import numpy as np

from halfstep_spec.numbers.random_words import random_words

_SEED = 20231


def patterns(name: str, count: int) -> np.ndarray:
    """Return `count` uint32 words, a stream of their own for each `name`."""
    return random_words(_SEED, 1, name, 0, (count,))


def reals(name: str, count: int, exponents: tuple[int, int]) -> np.ndarray:
    """Return float32 values of either sign with full significands and |x| in [2^lowest, 2^(highest + 1)).

    `exponents` are (lowest, highest), both met with the same chance.
    """
    lowest, highest = exponents
    words = patterns(name, count)
    exponent = patterns(f"{name} exponents", count) % np.uint32(highest - lowest + 1)
    field = (exponent.astype(np.int64) + lowest + 127).astype(np.uint32)
    return ((words & np.uint32(0x807FFFFF)) | (field << np.uint32(23))).view(np.float32)
