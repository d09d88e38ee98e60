"""Numbers without a sign, with roots on a straight line of codes, for second moments.

Contract: F16. Code c stands for ((c + above) / top)^8 under the power of two of its block.
"""

import dataclasses
import math

import numpy as np

from halfstep.arrays import Array, Arrays
from halfstep.rounding import draw
from halfstep.storage.base_codes import Codes, carry_past


@dataclasses.dataclass(frozen=True)
class UnsignedRoot:
    """Eighth powers of evenly spaced numbers, 256 of them.

    Attributes:
        name: "uroot8".
        above: the number added to a code: a larger one gives fewer binades, and finer steps in the lowest.
    """

    name: str
    above: int

    @property
    def top(self) -> int:
        """The largest code after that addition."""
        return 255 + self.above

    @property
    def unit(self) -> np.float32:
        """The eighth power of 256 over `top`, in float32."""
        return np.float32((256 / self.top) ** 8)

    @property
    def smallest(self) -> float:
        """The number of code 0."""
        return (self.above / self.top) ** 8

    @property
    def largest_gap(self) -> float:
        """The largest gap between numbers from 1/10 up, over the upper one."""
        numbers = (np.arange(self.above, self.top + 1) / self.top) ** 8
        numbers = numbers[numbers >= 0.1]
        return float((np.diff(numbers) / numbers[1:]).max())


UNSIGNED_ROOTS = {fmt.name: fmt for fmt in (UnsignedRoot("uroot8", 6),)}

# Of the eighth root: the first guess, and the constants of Newton's two steps.
GUESS = 0x47690000
STEPS = (1.126953125, 1.125)
LEAST = 2.0**-46
"""The least input of encoding, which is far below the smallest number."""
PLACE_BITS = 17
"""Of a place between codes: one more than a field, so that half a unit can be added."""
FIELDS = (1, 65534)
"""The bounds of the fields of words: the value of a code is up to two units of a place off."""

_ONE = 1 << PLACE_BITS
# Patterns of the smallest input of a root, and of 4.
_LEAST, _MOST = np.array([LEAST, 4.0], np.float32).view(np.int32).tolist()


class RootCodes(Codes):
    """Eighth powers of evenly spaced numbers, times the power of two of their block."""

    @classmethod
    def of(cls, fmt: UnsignedRoot) -> "RootCodes":
        """Return the codes of a format."""
        return cls(
            "uint8",
            fmt,
            fmt.largest_gap / 2,
            signed=False,
            nan_in_scale=True,
            # As of a table: half of the smallest number is normal, and the inverse of the largest scale.
            scale_range=(3 - math.frexp(fmt.smallest)[1], 253),
            carry=carry_past(1.0),
        )

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return codes of the root, rounded; there is no zero."""
        y = x * xp.floats((254 - xp.wide(scale)) << 23)
        # As integers: NaN becomes a number; a clamp of floats, which keeps NaN, takes far longer on a CPU.
        root, inverse = eighth_root(xp.behind(y), xp.floats(xp.clip(xp.bits(y), _LEAST, _MOST)))
        place = xp.integer(root * float(self.numbers.top * _ONE)) - self.numbers.above * _ONE
        drawn = _ONE // 2 if words is None else self._drawn(xp, words, inverse)
        return xp.clip((place + drawn) >> PLACE_BITS, 0, 255)

    def _drawn(self, xp: Arrays, words: Array, inverse: Array) -> Array:
        """Return the number added to a place: of a uniform d, d - d (1 - d) / (2 top root).

        So the mean of the root's square is kept, nu^(1/4): of the eighth root's, steps come out short.
        """
        k = xp.clip(draw(xp, words, 16), *FIELDS)
        less = xp.real(k * (65535 - k)) * (inverse * float(np.float32(2.0**-16 / self.numbers.top)))
        return k * 2 + 1 - xp.integer(less)

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the numbers: three squares and a product."""
        x = xp.real(codes + self.numbers.above) * (1 / 256)
        for _ in range(3):
            x = xp.square(x)
        return x * (xp.unit(scale) * float(self.numbers.unit))


ROOT_CODES = {name: RootCodes.of(fmt) for name, fmt in UNSIGNED_ROOTS.items()}


def eighth_root(xp: Arrays, y: Array) -> tuple[Array, Array]:
    """Return y^(1/8), y from 2^-46 to 4, to within 2.1 x 2^-24 of it, and about y^(-1/8).

    By products, sums and a shift.

    Two of Newton's steps to y^(-1/8), the first with a constant that halves what it leaves; then the root
    from that, and what it is short of by its own eighth power.

    Source: ours (contract F16).
    """
    x = xp.floats(GUESS - (xp.bits(y) >> 3))
    eighth = y * 0.125
    for c in STEPS:
        fourth = xp.square(xp.square(x))
        x = x * (c - xp.product(eighth * fourth, fourth))
    square = xp.square(x)
    root = xp.product(y, xp.square(square) * (square * x))
    return root + xp.product(root, 0.875 * (1.0 - xp.product(root, x))), x
