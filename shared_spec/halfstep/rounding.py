"""Rounding, written once over the arrays of a framework. Contract: section R.

Words are int32 patterns, of which the top 16 bits are read; None stands for nearest, ties to even.
"""

from typing import Any

from halfstep.arrays import Arrays

_DRAWN = 16
"""Random bits of a rounding: a field of a word (contract W6)."""


def draw(xp: Arrays, words: Any, bits: int) -> Any:
    """Return what is added to `bits` bits that are cut off: the top 16 of a word, as the top of these.

    Below them stands half a unit of theirs, where there is room.
    """
    if bits <= _DRAWN:
        return xp.shift(words, 32 - bits)
    unit = 1 << (bits - _DRAWN)
    return ((words >> (32 - bits)) & ((1 << bits) - unit)) | (unit >> 1)


def cut(xp: Arrays, bits: Any, words: Any, drop: int) -> Any:
    """Return patterns without their low bits, rounded."""
    add = ((1 << drop - 1) - 1) + ((bits >> drop) & 1) if words is None else draw(xp, words, drop)
    return (bits + add) >> drop


def whole(xp: Arrays, y: Any, words: Any) -> Any:
    """Return float32 y, from 0 to 2^15, rounded to int32."""
    if words is None:
        return xp.integer(xp.nearest(y))
    below = xp.integer(y)
    fraction = xp.integer((y - xp.real(below)) * 2.0 ** (_DRAWN + 1))
    return below + ((((fraction + 1) >> 1) + draw(xp, words, _DRAWN)) >> _DRAWN)
