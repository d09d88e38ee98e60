"""Second moments as their fourth roots, and first moments beside them in units of a power of two.

Contract: F17, F18. The constants of both; patterns are of float32, and codes end at the bit `DROP`.
"""

import dataclasses

import numpy as np

DROP = 19
"""Bits of a pattern below the last one of a code."""
FIRST_GUESS = 0x4F58DA00
"""Less a quarter of the pattern of v: that of about v^(-1/4)."""
EXPONENT = 0x7F800000
"""The exponent field of a pattern, and infinity."""


@dataclasses.dataclass(frozen=True)
class ShiftedFloat:
    """Numbers without a sign whose codes c stand for the pattern (c + base) << 19, less `offset`.

    Attributes:
        name: of the codes.
        base: what code 0 stands on.
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
"""Of second moments; code 255 is NaN."""
MU_LAW = ShiftedFloat("mulaw8", 1968, 127, offset=2.0**-4)
"""The magnitudes of first moments."""
UNIT_BASE = ((FOURTH_ROOT.base << DROP + 1) - (127 << 23)) % 2**32
"""The exponent field of `(code << 20) + UNIT_BASE` is that of the power of two below the root of nu."""
