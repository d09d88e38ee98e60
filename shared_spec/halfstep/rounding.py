"""Rounding, written once for the arrays of both frameworks. Contract: section R.

Words are int32 patterns with 16 random bits at the top. None stands for nearest, ties to even.

Source: M. Croci et al., "Stochastic rounding", R. Soc. Open Sci. 9(3), 2022, section 2, mode 1, by magnitude.
The carry form is ours.
"""

from collections.abc import Iterable

from halfstep.arrays import Array, Arrays, dtype_name
from halfstep.did_you_mean import listed
from halfstep.float_formats import FLOAT_FORMATS, FloatFormat

ROUNDING_TARGETS = ("float32", *FLOAT_FORMATS)
_DRAWN = 16
"""Number of random bits in a rounding, which are a field of a word (contract W6)."""


def check_round_to(
    dtype: str, x: Array, words: Array, sources: Iterable[str], word_dtypes: Iterable[str]
) -> None:
    """Raise an error for wrong arguments of `round_to`, given the allowed dtypes."""
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
    """Return the random number that is added to `bits` bits before they are cut off.

    Its top bits are the top 16 bits of the word. If there is room below them, half a unit follows.
    """
    if bits <= _DRAWN:
        return xp.shift(words, 32 - bits)
    unit = 1 << (bits - _DRAWN)
    return ((words >> (32 - bits)) & ((1 << bits) - unit)) | (unit >> 1)


def cut(xp: Arrays, bits: Array, words: Array, drop: int) -> Array:
    """Return patterns rounded to fewer bits, without the low `drop` bits."""
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
    """Return patterns rounded to multiples of the smallest number in `fmt`, up to its first normal number.

    The products and the difference are exact in float32. XLA on CPU computes with zero instead of float32's
    subnormal numbers. In all formats used here, such a number has a fraction below 2^-17.
    """
    bounded = xp.clip(magnitude, high=fmt.first_normal)
    return whole(xp, xp.floats(bounded) * (1 / fmt.smallest), words)


def code_of_magnitude(xp: Arrays, x: Array, fmt: FloatFormat, words: Array) -> Array:
    """Return the int32 code for |x| in `fmt`, or any code if x is not finite.

    `fmt` must have fewer exponents than float32. The integers up to 127 are allowed too. Below the smallest
    normal number, a code counts multiples of the smallest number, and a pattern that is cut like a normal
    number gives a lower code. Above it, the count of multiples is the lower code.
    """
    magnitude = xp.bits(x) & 0x7FFFFFFF
    normal = cut(xp, magnitude, words, 23 - fmt.mantissa_bits) - fmt.base
    code = xp.clip(normal, low=multiple_of_smallest(xp, magnitude, fmt, words))
    return xp.clip(code, high=fmt.max_code)
