"""Second moments kept as their fourth roots, and first moments in units of a power of two beside them.

Contract: F17, F18. Vectors: fourth_roots.

A fourth root that is rounded linearly keeps the mean of nu^(1/4), which a step needs (F6). Its reciprocal
comes out of three steps of Newton's, which are multiplications and a subtraction: no root, no quotient.
"""

import dataclasses

import numpy as np

from halfstep_spec.storage.base_codes import Codes

_BASE, _DROP = 1833, 19
_LARGEST, _NAN = 254, 255
FLOOR = np.uint32(_BASE << _DROP).view(np.float32) ** 4
"""The number of code 0: the smallest second moment."""
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)

# Of first moments: the magnitude plus 1/16 is a float of three and four bits, from 1/16 up.
_OFFSET = np.float32(2.0**-4)
_FIRST = int(_OFFSET.view(np.uint32)) >> _DROP


def inverse_fourth_root(v: np.ndarray) -> np.ndarray:
    """Return y, about v^(-1/4): three steps of Newton's from a guess by the pattern.

    y <- y (5/4 - ((v/4) y^2) y^2). Two infinities meet where v is infinite: y is then infinite or NaN.
    """
    with np.errstate(all="ignore"):
        q = v * np.float32(0.25)
        y = (np.uint32(0x4F58DA00) - (v.view(np.uint32) >> np.uint32(2))).view(np.float32)
        for _ in range(3):
            t = y * y
            y = y * (np.float32(1.25) - (q * t) * t)
    return y


def inverse_root(v: np.ndarray) -> np.ndarray:
    """Return 1/sqrt(v), about: the square of `inverse_fourth_root`."""
    with np.errstate(all="ignore"):
        y = inverse_fourth_root(v)
        return y * y


def power_of_root(codes: np.ndarray) -> np.ndarray:
    """Return the power of two U of each code: the root of its number is in [U, 2.25 U).

    A pattern shifted to the left by one bit is about that of the square.
    """
    bits = (codes.astype(np.uint32) + np.uint32(_BASE) << np.uint32(_DROP + 1)) - np.uint32(127 << 23)
    return (bits & _INFINITY).view(np.float32)


@dataclasses.dataclass(frozen=True)
class FourthRootCodes(Codes):
    """Floats of four exponent and four mantissa bits, from `_BASE` up: the fourth roots of the stored values.

    There is no zero. Code 255 is NaN; finite numbers past the largest code get that.
    """

    signed = False
    nan_in_scale = False

    @property
    def half_gap(self) -> float:
        """Four times that of the root."""
        return 2.0**-3

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return the codes of fourth roots."""
        y = inverse_fourth_root(x)
        with np.errstate(all="ignore"):
            root = (x * y) * (y * y)
        bits = np.clip(root.view(np.uint32) & _MAGNITUDE, _BASE << _DROP, _BASE + _LARGEST << _DROP)
        codes = (bits.astype(np.int64) + _added(bits, words) >> _DROP) - _BASE
        return np.where(x < np.inf, codes, _NAN).astype(np.uint8)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the fourth powers: exact, since five bits to the fourth are twenty."""
        root = (codes.astype(np.uint32) + np.uint32(_BASE) << np.uint32(_DROP)).view(np.float32)
        return np.where(codes == _NAN, np.float32(np.nan), root**2 * root**2)


@dataclasses.dataclass(frozen=True)
class MuLawCodes(Codes):
    """A sign and 128 magnitudes: floats of three exponent and four mantissa bits, less 1/16.

    They are in units of `power_of_root`. There is no NaN: the second moment beside has one.

    Source: the offset is that of the mu-law of ITU-T G.711, which has the same segments.
    """

    nan_in_scale = False
    for_second_moments = False

    @property
    def half_gap(self) -> float:
        """That of the floats, above the offset."""
        return 2.0**-5

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return the sign, of a NaN 0, and the code of the magnitude."""
        bits = (np.abs(x) + _OFFSET).view(np.uint32) & _MAGNITUDE
        bits = np.minimum(bits, _FIRST + 127 << _DROP)
        codes = (bits.astype(np.int64) + _added(bits, words) >> _DROP) - _FIRST
        return (codes | np.where(np.signbit(x) & ~np.isnan(x), 128, 0)).astype(np.uint8)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers: exact."""
        bits = (codes & 127).astype(np.uint32) + np.uint32(_FIRST) << np.uint32(_DROP)
        magnitude = bits.view(np.float32) - _OFFSET
        return np.where(codes & 128, -magnitude, magnitude)


def _added(bits: np.ndarray, words: np.ndarray | None) -> np.ndarray:
    """Return the number added to patterns before they are cut: R3, or for nearest, ties to even, R2."""
    if words is None:
        return (1 << _DROP - 1) - 1 + (bits.astype(np.int64) >> _DROP & 1)
    return 8 * (np.asarray(words, np.uint32).astype(np.int64) >> 16) + 4
