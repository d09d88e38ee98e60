"""Rounding, written once over the arrays of a framework. Contract: section R.

Words are int32 patterns, of which the top 16 bits are read; None stands for nearest, ties to even.

Source: M. Croci et al., "Stochastic rounding", R. Soc. Open Sci. 9(3), 2022, section 2, mode 1, by magnitude.
The carry form is ours.
"""

from collections.abc import Iterable

from halfstep.arrays import Array, Arrays, dtype_name
from halfstep.did_you_mean import listed
from halfstep.float_formats import FLOAT_FORMATS, FloatFormat

ROUNDING_TARGETS = ("float32", *FLOAT_FORMATS)
_DRAWN = 16
"""Random bits of a rounding: a field of a word (contract W6)."""


def check_round_to(
    dtype: str, x: Array, words: Array, sources: Iterable[str], word_dtypes: Iterable[str]
) -> None:
    """Refuse arguments of `round_to`, whose arrays are of these dtypes."""
    if dtype not in ROUNDING_TARGETS:
        raise ValueError(f"round_to: dtype={dtype} is not a rounding target. Use {listed(ROUNDING_TARGETS)}.")
    if (given := dtype_name(x)) not in sources:
        raise TypeError(f"round_to: x is {given}; it is rounded from float32. Cast it to float32.")
    if words is None:
        return
    if (given := dtype_name(words)) not in word_dtypes:
        raise TypeError(f"round_to: words are {given}. Use one uint32 word per element.")
    if words.shape != x.shape:
        raise ValueError(
            f"round_to: words have shape {tuple(words.shape)}, x {tuple(x.shape)}. "
            "Use one uint32 word per element."
        )


def draw(xp: Arrays, words: Array, bits: int) -> Array:
    """Return what is added to `bits` bits that are cut off: the top 16 of a word, as the top of these.

    Below them stands half a unit of theirs, where there is room.
    """
    if bits <= _DRAWN:
        return xp.shift(words, 32 - bits)
    unit = 1 << (bits - _DRAWN)
    return ((words >> (32 - bits)) & ((1 << bits) - unit)) | (unit >> 1)


def cut(xp: Arrays, bits: Array, words: Array, drop: int) -> Array:
    """Return patterns without their low bits, rounded."""
    add = ((1 << drop - 1) - 1) + ((bits >> drop) & 1) if words is None else draw(xp, words, drop)
    return (bits + add) >> drop


def whole(xp: Arrays, y: Array, words: Array) -> Array:
    """Return float32 y, from 0 to 2^15, rounded to int32."""
    if words is None:
        return xp.integer(xp.nearest(y))
    below = xp.integer(y)
    fraction = xp.integer((y - xp.real(below)) * 2.0 ** (_DRAWN + 1))
    return below + ((((fraction + 1) >> 1) + draw(xp, words, _DRAWN)) >> _DRAWN)


def multiple_of_smallest(xp: Arrays, magnitude: Array, fmt: FloatFormat, words: Array) -> Array:
    """Return which multiple of the smallest number of `fmt` patterns up to its smallest normal one round to.

    In float32: the products and the difference are exact. XLA on CPU computes with zero in place of numbers
    that are subnormal in float32. In any `fmt` that comes here, such a number has a fraction below 2^-17.
    """
    bounded = xp.clip(magnitude, high=fmt.first_normal)
    return whole(xp, xp.floats(bounded) * (1 / fmt.smallest), words)


def code_of_magnitude(xp: Arrays, x: Array, fmt: FloatFormat, words: Array) -> Array:
    """Return the code of a state of |x| in `fmt`, in int32; any code if it is not finite.

    For every `fmt` that has fewer exponents than float32, the integers up to 127 among them. Below the
    smallest normal number, a code counts multiples of the smallest number. There, a pattern that is cut as
    the pattern of a normal number gives a lower code. Above it, the count of multiples is the lower code.
    """
    magnitude = xp.bits(x) & 0x7FFFFFFF
    normal = cut(xp, magnitude, words, 23 - fmt.mantissa_bits) - fmt.base
    code = xp.clip(normal, low=multiple_of_smallest(xp, magnitude, fmt, words))
    return xp.clip(code, high=fmt.max_code)
