"""Numbers without a sign whose root lies on a straight line of codes, for second moments.

Contract: F16. Code c stands for ((c + above) / top)^8 under the power of two of its block.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class UnsignedRoot:
    """Eighth powers of evenly spaced numbers, 256 of them.

    Attributes:
        name: "uroot8".
        above: what is added to a code: more of it is fewer binades, and finer steps in the lowest.
    """

    name: str
    above: int

    @property
    def top(self) -> int:
        """What the largest code becomes by that."""
        return 255 + self.above

    @property
    def unit(self) -> np.float32:
        """The eighth power of 256 over `top`, in float32."""
        return np.float32((256 / self.top) ** 8)

    @property
    def smallest(self) -> float:
        """What code 0 stands for."""
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
"""What is encoded is raised to this, which is far below the smallest number."""
PLACE_BITS = 17
"""Of a place between codes: one more than a field, so that half a unit can be added."""
FIELDS = (1, 65534)
"""To which the fields of words are clamped: what a code stands for is up to two units of a place off."""
