"""Seeds: a number in [0, 2^64), or two uint32 words. Contract: W2."""

import operator
from typing import Any, TypeAlias

Seed: TypeAlias = Any
"""An integer, or two words in a sequence or in an array from either framework."""
TWO_WORDS = "two uint32 words (high, low)"


def as_seed(caller: str, seed: Seed) -> int:
    """Return `seed`, an integer or a sequence of two uint32 words (high, low), as an integer in [0, 2^64).

    Example:
        >>> as_seed("AdamW", (1, 5)) == 2**32 + 5
        True
    """
    if isinstance(seed, tuple | list) and len(seed) == 2:
        high, low = (_integer(caller, seed, word) for word in seed)
        if max(high, low) < 2**32 and min(high, low) >= 0:
            return high << 32 | low
        raise ValueError(f"{caller}: seed={seed} is not {TWO_WORDS}. Use words in [0, 2^32), or an integer.")
    value = _integer(caller, seed, seed)
    if not 0 <= value < 2**64:
        raise ValueError(
            f"{caller}: seed={value} is outside [0, 2^64). Use an integer in that range, or {TWO_WORDS}."
        )
    return value


def _integer(caller: str, seed: Seed, word: Seed) -> int:
    try:
        if isinstance(word, bool):
            raise TypeError
        return operator.index(word)
    except TypeError:
        raise TypeError(
            f"{caller}: seed={seed!r} is not an integer. Use an integer in [0, 2^64), or {TWO_WORDS}."
        ) from None
