"""Seeds: a number in [0, 2^64), or two uint32 words.

Contract: W2.
"""

import operator
from collections.abc import Sequence

import numpy as np
from torch import Tensor

Seed = int | Sequence[int] | Tensor | np.ndarray
_WORDS = "two uint32 words (high, low)"


def as_seed(caller: str, seed: Seed) -> int:
    """Return `seed` as one integer in [0, 2^64).

    Args:
        caller: whose argument it is, for the message.
        seed: an integer, or two uint32 words (high, low) in a sequence, tensor or array.

    Raises:
        TypeError: if it is neither.
        ValueError: if it is out of range.

    Example:
        >>> as_seed("AdamW", (1, 5)) == 2**32 + 5
        True
    """
    if isinstance(seed, (Tensor, np.ndarray)):
        seed = seed.tolist()
    if isinstance(seed, (tuple, list)) and len(seed) == 2:
        high, low = (_integer(caller, seed, word) for word in seed)
        if max(high, low) < 2**32 and min(high, low) >= 0:
            return high << 32 | low
        raise ValueError(f"{caller}: seed={seed} is not {_WORDS}. Use words in [0, 2^32), or an integer.")
    value = _integer(caller, seed, seed)
    if not 0 <= value < 2**64:
        raise ValueError(
            f"{caller}: seed={value} is outside [0, 2^64). Use an integer in that range, or {_WORDS}."
        )
    return value


def _integer(caller: str, seed, word) -> int:
    try:
        if isinstance(word, bool):
            raise TypeError
        return operator.index(word)
    except TypeError:
        raise TypeError(
            f"{caller}: seed={seed!r} is not an integer. Use an integer in [0, 2^64), or {_WORDS}."
        ) from None
