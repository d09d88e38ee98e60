"""Codes that are floats without a sign, for second moments.

Contract: F6.
"""

import dataclasses

import numpy as np

from halfstep_spec.storage.base_codes import Codes
from halfstep_spec.storage.unsigned_floats import UnsignedFloat, decode_unsigned, encode_unsigned


@dataclasses.dataclass(frozen=True)
class UnsignedCodes(Codes):
    """Unsigned floats, counted from the base of their block. They store nothing but zero as zero.

    Attributes:
        format: of the codes.
    """

    format: UnsignedFloat
    signed = False

    @property
    def carry(self) -> int:
        """None: a binade of room is left above the maximum anyway."""
        return 0

    @property
    def half_gap(self) -> float:
        """2^-(m + 1), m the mantissa bits."""
        return 2.0 ** -(self.format.mantissa_bits + 1)

    @property
    def scale_range(self) -> tuple[int, int]:
        """All binades of a block are binades of normal float32 numbers."""
        return 2**self.format.exponent_bits - 1, 253

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return codes counted from the base of their block."""
        assert scale is not None
        return encode_unsigned(x, words, self.format, self.format.base(scale.astype(np.int64)))

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers from the base of their block up."""
        assert scale is not None
        return decode_unsigned(codes, self.format, self.format.base(scale.astype(np.int64)))
