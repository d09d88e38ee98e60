"""Integers under a scale of three significant bits, and codes under a scale that is the same for all blocks.

Contract: F13 to F15, F18. Vectors: relative, formats.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.numbers.rounding import encode_float
from halfstep_spec.storage.base_codes import NAN_SCALE, Codes
from halfstep_spec.storage.float_codes import INT8, SignedCodes
from halfstep_spec.storage.fourth_root_codes import MuLawCodes
from halfstep_spec.storage.unsigned_floats import UnsignedFloat, decode_unsigned

# Of a fine scale: three significant bits, from 2^-50 up.
_SCALES, _BASE = UnsignedFloat("fine", 6, 2), 77 << 2
# The range of codes without a scale must hold 7.27, at b1 = 0.9 and b2 = 0.999, and some more.
_BOUND = np.float32(7.5)
_PAST = np.float32(8.0)
# Below this share of a unit the stored value is exact zero: an average that decays ends there.
_DEAD = np.float32(1 / 16)


@dataclasses.dataclass(frozen=True)
class FixedCodes(Codes):
    """Floats, kept as patterns, under the scale of a block with the largest magnitude 7.5: none is stored.

    Attributes:
        scaled: the codes under that scale.
    """

    scaled: SignedCodes
    nan_in_scale = False
    for_second_moments = False

    @property
    def half_gap(self) -> float:
        """That of the codes."""
        return self.scaled.half_gap

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return x over the scale, rounded."""
        # Past the largest code it saturates, also where x over the scale is past float32's largest number.
        bounded = np.clip(x, -_PAST, _PAST)
        codes = self.scaled.encode(bounded, self._scales(x), words, nonzero)
        return np.where(np.isfinite(x), codes, self.scaled.format.nan_code).astype(codes.dtype)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers times the scale."""
        return self.scaled.decode(codes, self._scales(codes))

    def _scales(self, like: np.ndarray) -> np.ndarray:
        return np.broadcast_to(self.scaled.scale(_BOUND.reshape(1))[0], like.shape)


@dataclasses.dataclass(frozen=True)
class FineIntegerCodes(Codes):
    """Integers from -K to K under a fine scale s, of three significant bits: the stored value is q s.

    Attributes:
        largest: K.
    """

    largest: int = 127
    dtype = "int8"
    for_second_moments = False

    @property
    def scale_range(self) -> tuple[int, int]:
        """The bytes that are numbers."""
        return 1, NAN_SCALE - 1

    @property
    def half_gap(self) -> float:
        """Half of the gap below the largest code."""
        return 0.5 / self.largest

    def scale(self, block_max: np.ndarray) -> np.ndarray:
        """Return the scales, rounded up: `block_max` over K fits. Past the largest scale comes NaN."""
        least = block_max * np.float32(1 / self.largest)
        drop = 23 - _SCALES.mantissa_bits
        codes = (least.view(np.uint32).astype(np.int64) + (1 << drop) - 1 >> drop) - _BASE
        return np.clip(codes, 1, NAN_SCALE).astype(np.uint8)

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return x / s, rounded to integers that stop at K."""
        assert scale is not None
        codes = encode_float(self._ratio(x, scale), INT8, words, saturate=True).astype(np.int64)
        sign, magnitude = codes >> 7, np.minimum(codes & 127, self.largest)
        magnitude = np.where(nonzero & (magnitude == 0), 1, magnitude)
        return np.where(scale == NAN_SCALE, 0, (1 - 2 * sign) * magnitude).astype(np.int8).view(np.uint8)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the integers times s: exact."""
        assert scale is not None
        return codes.view(np.int8).astype(np.float32) * self._unit(scale)

    def _ratio(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return the quotient x / s: for a stored value, its integer."""
        return np.where(np.isfinite(x), x, np.float32(0)) / self._unit(np.minimum(scale, NAN_SCALE - 1))

    def _unit(self, scale: np.ndarray) -> np.ndarray:
        return decode_unsigned(scale, _SCALES, _BASE)


@dataclasses.dataclass(frozen=True)
class DitheredCodes(FineIntegerCodes):
    """Integers from -7 to 7 in four bits, rounded with a dither d: the stored value is (q - d) s.

    The code is q + 8; 0 is exact zero, the code of zero alone. d is a number of the word, in (-1/2, 1/2).
    """

    largest: int = 7
    dtype = "uint8"
    packed = True
    dithered = True

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return x / s + d, rounded to nearest integers that stop at 7, and 8 above that.

        d is 0 without words.
        """
        assert scale is not None
        y = self._ratio(x, scale)
        q = np.clip(np.rint(y + _dither(words)), -self.largest, self.largest)
        return np.where((np.abs(y) <= _DEAD) | (scale == NAN_SCALE), 0, q + 8).astype(np.uint8)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return (q - d) s, rounded once."""
        assert scale is not None
        values = (codes.astype(np.float32) - np.float32(8) - _dither(words)) * self._unit(scale)
        return np.where(codes == 0, np.float32(0), values)


def _dither(words: np.ndarray | None) -> np.ndarray | np.float32:
    """Return odd multiples of 2^-17 in (-1/2, 1/2), from the top 16 bits; q less such a d is exact."""
    if words is None:
        return np.float32(0)
    odd = 2 * (words >> np.uint32(16)) + np.uint32(1)
    return odd.astype(np.float32) * np.float32(2.0**-17) - np.float32(0.5)


FIXED_CODES: dict[str, Codes] = {
    "float8_e3m4": FixedCodes(SignedCodes(FLOAT_FORMATS["float8_e3m4"])),
    "mulaw8": MuLawCodes(),
}
"""By name: codes that `relative` takes without a block size."""
FINE_CODES: dict[str, Codes] = {"int8": FineIntegerCodes(), "int4": DitheredCodes()}
"""By name: codes under a fine scale."""
