"""Second moments as their fourth roots, and first moments beside them in units of a power of two.

Contract: F17, F18. A fourth root that is rounded linearly keeps the mean of nu^(1/4), which a step needs
(F6). Its reciprocal comes out of three steps of Newton's: multiplications and a subtraction, no root, no
quotient. Patterns are of float32, and codes end at the bit `DROP`.
"""

import dataclasses

import numpy as np

from halfstep.arrays import Array, Arrays
from halfstep.rounding import cut
from halfstep.storage.base_codes import Codes

DROP = 19
"""Bits of a pattern below the last one of a code."""
FIRST_GUESS = 0x4F58DA00
"""Less a quarter of the pattern of v: that of about v^(-1/4)."""
EXPONENT = 0x7F800000
"""The exponent field of a pattern, and infinity."""


@dataclasses.dataclass(frozen=True)
class ShiftedFloat:
    """Unsigned numbers: code c stands for the float with pattern (c + base) << 19, less `offset`.

    Attributes:
        name: of the codes.
        base: the pattern of code 0.
        last: the largest code of a number.
        power: to which the number is raised that a code stands for.
        offset: see above.
    """

    name: str
    base: int
    last: int
    power: int = 1
    offset: float = 0.0

    @property
    def smallest(self) -> np.float32:
        """The number of code 0."""
        return (np.uint32(self.base << DROP).view(np.float32) - np.float32(self.offset)) ** self.power

    @property
    def largest(self) -> np.float32:
        """The number of the last code."""
        last = np.uint32((self.base + self.last) << DROP).view(np.float32)
        return (last - np.float32(self.offset)) ** self.power


FOURTH_ROOT = ShiftedFloat("uroot4_e4m4", 1833, 254, power=4)
"""Of second moments."""
MU_LAW = ShiftedFloat("mulaw8", 1968, 127, offset=2.0**-4)
"""The magnitudes of first moments."""
UNIT_BASE = ((FOURTH_ROOT.base << DROP + 1) - (127 << 23) + 2**31) % 2**32 - 2**31
"""The exponent field of `(code << 20) + UNIT_BASE` is that of the power of two below the root of nu."""


class FourthRootCodes(Codes):
    """Floats of four exponent and four mantissa bits: the fourth roots of the stored values."""

    has_inverse_root = True

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the codes of fourth roots."""
        y = inverse_fourth_root(xp, x)
        return self._cut(xp, xp.clip(xp.bits((x * y) * xp.square(y)), self.numbers.base << DROP), words)

    def with_inverse_root(self, xp: Arrays, x: Array, words: Array) -> tuple[Array, Array]:
        """Return the codes of `encode`, and about 1/sqrt(x) of x as it is.

        Args:
            xp: of the framework.
            x: float32, above the smallest number by more than the error of its root.
            words: int32, or None for nearest, ties to even.
        """
        y = inverse_fourth_root(xp, x)
        s = xp.square(y)
        return self.marked(xp, x, None, self._cut(xp, xp.bits((x * y) * s), words)), s

    def _cut(self, xp: Arrays, bits: Array, words: Array) -> Array:
        last = (self.numbers.base + self.numbers.last) << DROP
        return cut(xp, xp.clip(bits, high=last), words, DROP) - self.numbers.base

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the fourth powers: exact, since five bits to the fourth are twenty."""
        return xp.square(xp.square(xp.floats((codes + self.numbers.base) << DROP)))


class MuLawCodes(Codes):
    """A sign and 128 magnitudes: floats of three exponent and four mantissa bits, less 1/16."""

    power_unit = True

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the codes; NaN has the largest magnitude, and no sign."""
        last = (self.numbers.base + self.numbers.last) << DROP
        code = cut(xp, xp.clip(xp.bits(abs(x) + self.numbers.offset), high=last), words, DROP)
        return (code - self.numbers.base) | xp.sign(x, 128)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers: exact."""
        magnitude = xp.floats(((codes & 127) + self.numbers.base) << DROP) - self.numbers.offset
        return xp.floats(xp.bits(magnitude) | ((codes & 128) << 24))


# A gap of a fourth root is four of its number.
UROOT4 = FourthRootCodes("uint8", FOURTH_ROOT, 4 * 2.0**-5, signed=False, nan_code=255)
MULAW8 = MuLawCodes("uint8", MU_LAW, 2.0**-5, for_second_moments=False)


def inverse_fourth_root(xp: Arrays, v: Array) -> Array:
    """Return y, about v^(-1/4): three times y <- y (5/4 - ((v/4) y^2) y^2), each operation rounded once.

    Args:
        xp: of the framework.
        v: float32, not negative. Of infinity y is infinite or NaN.
    """
    quarter, y = v * 0.25, xp.floats(FIRST_GUESS - (xp.bits(v) >> 2))
    for _ in range(3):
        square = xp.square(y)
        y = y * (1.25 - xp.product(quarter * square, square))
    return y


def power_of_root(xp: Arrays, codes: Array) -> Array:
    """Return the power of two U of each code of a fourth root: the root of its number is in [U, 2.25 U)."""
    return xp.floats(_power_bits(codes))


def inverse_power_of_root(xp: Arrays, codes: Array) -> Array:
    """Return 1/U."""
    return xp.floats((254 << 23) - _power_bits(codes))


def _power_bits(codes: Array) -> Array:
    # A pattern shifted by one bit is about that of the square.
    return ((codes << DROP + 1) + UNIT_BASE) & EXPONENT
