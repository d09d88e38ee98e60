"""Codes that are floats with a sign, and integers.

Contract: F3, F5.
"""

import dataclasses
import math

import numpy as np

from halfstep_spec.numbers.float_formats import FloatFormat
from halfstep_spec.numbers.rounding import decode_float, encode_float
from halfstep_spec.storage.base_codes import Codes


@dataclasses.dataclass(frozen=True)
class PlainCodes(Codes):
    """Floats as they are, with no scale.

    Attributes:
        format: of the codes.
    """

    format: FloatFormat
    nan_in_scale = False

    @property
    def dtype(self) -> str:
        """That of the format."""
        return self.format.name

    @property
    def half_gap(self) -> float:
        """2^-(p + 1), p the explicit mantissa bits."""
        return 2.0 ** -(self.format.mantissa_bits + 1)

    @property
    def for_second_moments(self) -> bool:
        """Without a scale, the exponents of float32 are needed: squares go down to 1e-20."""
        return self.format.exponent_bits == 8

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return x, rounded."""
        return encode_float(x, self.format, words, saturate=True)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers themselves."""
        return decode_float(codes, self.format)


@dataclasses.dataclass(frozen=True)
class SignedCodes(PlainCodes):
    """Floats with a sign and a scale: the stored value is a code's number times 2^(byte - 127 - e).

    e is the exponent of the largest code.
    """

    @property
    def for_second_moments(self) -> bool:
        """With a scale, small numbers are lifted to the smallest, which is small enough."""
        return True

    @property
    def carry(self) -> int:
        """The gap between the significand of the largest code and that of the next power of two."""
        return 0x7FFFFF - (int(self._largest.view(np.uint32)) & 0x7FFFFF)

    @property
    def scale_range(self) -> tuple[int, int]:
        """Below, the smallest code would decode to a subnormal float32; above is `NAN_SCALE`."""
        smallest = decode_float(np.array(1), self.format)
        return 1 + self._exponent - (math.frexp(smallest)[1] - 1), 254

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return x / 2^s, rounded."""
        assert scale is not None
        with np.errstate(under="ignore", invalid="ignore", over="ignore"):
            y = np.ldexp(x, -self._shift(scale)).astype(np.float32)
        codes = encode_float(y, self.format, words, saturate=True)
        return np.where(nonzero & (codes == 0), 1, codes).astype(codes.dtype)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers times 2^s."""
        assert scale is not None
        with np.errstate(over="ignore"):
            return np.ldexp(self._numbers(codes), self._shift(scale)).astype(np.float32)

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return decode_float(codes, self.format)

    @property
    def _largest(self) -> np.float32:
        return np.float32(decode_float(np.array(self.format.max_code), self.format))

    @property
    def _exponent(self) -> int:
        return math.frexp(self._largest)[1] - 1

    def _shift(self, scale: np.ndarray) -> np.ndarray:
        return scale.astype(np.int32) - 127 - self._exponent


INT8 = FloatFormat("int8", 0, 7, -6, 127, 128, 128)
"""The integers as a float format of subnormal numbers with quantum 1: one rounding serves all.

The code of NaN is that of -0, which integers do not have.
"""


@dataclasses.dataclass(frozen=True)
class IntegerCodes(SignedCodes):
    """int8, from -127 to 127, in two's complement."""

    format: FloatFormat = INT8
    nan_in_scale = True

    @property
    def for_second_moments(self) -> bool:
        """Small numbers are raised to 1/127 of the largest, by orders of magnitude."""
        return False

    @property
    def half_gap(self) -> float:
        """Half of the gap below the largest code."""
        return 0.5 / 127

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return x / 2^s, rounded."""
        codes = super().encode(x, scale, words, nonzero).astype(np.int64)
        return np.where(codes >= 128, 128 - codes, codes).astype(np.int8).view(np.uint8)

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return codes.view(np.int8).astype(np.float32)
