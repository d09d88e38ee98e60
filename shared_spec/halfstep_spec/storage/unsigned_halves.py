"""A 16-bit float without a sign, for second moments: the bit of the sign belongs to the mantissa.

Contract: F21. Vectors: formats. Its numbers times 2^80 are float32 numbers from 2 up, cut to nine bits of
mantissa, and codes are the patterns of these, minus the bits that all share.
"""

import dataclasses

import numpy as np

from halfstep_spec.storage.base_codes import Codes

_DROP = 14
_FIRST = 1 << 16
_UP = np.float32(2.0**80)
_DOWN = np.float32(2.0**-80)
NAN_CODE = 65535
"""NaN, and numbers past the largest one."""
LARGEST = np.float32((2 - 2.0**-9) * 2.0**47)


@dataclasses.dataclass(frozen=True)
class UnsignedHalfCodes(Codes):
    """Floats of seven exponent and nine mantissa bits, from 2^-79 to 2^48, and no zero."""

    dtype = "uint16"
    signed = False
    nan_in_scale = False

    @property
    def half_gap(self) -> float:
        """2^-10."""
        return 2.0**-10

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return codes; numbers below the smallest one get its code."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            bits = np.maximum(np.asarray(x, np.float32) * _UP, np.float32(2)).view(np.uint32)
        bits = bits.astype(np.int64)
        if words is None:
            add = (1 << _DROP - 1) - 1 + (bits >> _DROP & 1)
        else:
            add = np.asarray(words, np.uint32).astype(np.int64) >> 16 & (1 << _DROP) - 1
        codes = (bits + add >> _DROP) - _FIRST
        return np.where(x <= LARGEST, codes, NAN_CODE).astype(np.uint16)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers: exact."""
        bits = (codes.astype(np.uint32) + np.uint32(_FIRST)) << np.uint32(_DROP)
        with np.errstate(invalid="ignore"):
            return bits.view(np.float32) * _DOWN
