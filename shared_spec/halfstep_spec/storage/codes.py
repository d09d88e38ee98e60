"""What the codes of a state format are: floats with a sign or without, integers, numbers of a table.

Contract: F3, F5 to F10. Elementwise: which elements share a scale is decided in `formats.py`.
"""

import dataclasses
import math

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_spec.numbers.rounding import decode_float, encode_float
from halfstep_spec.storage.tables import TABLES, Table, decode_table, encode_table
from halfstep_spec.storage.unsigned_floats import (
    NAN_CODE,
    UNSIGNED_FLOATS,
    UnsignedFloat,
    decode_unsigned,
    encode_unsigned,
)

NAN_SCALE = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""


class Codes:
    """What a `Format` asks of its codes.

    Attributes:
        dtype: the label of the codes in golden vectors.
        signed: whether negative values can be stored.
        packed: whether they are of 4 bits, two of them kept in a byte; `Format` packs them.
        nan_in_scale: whether a NaN marks its block, since there is no code for it.
        for_second_moments: whether they hold small positive numbers beside large ones well enough for those.
        dithered: whether one word serves all elements, and is asked for again by `decode`.
        half_gap: half the largest relative gap between neighbours, subnormal numbers aside (contract F3).
        carry: added to the pattern of a block's maximum: past the largest code it reaches the next exponent.
        scale_range: the lowest and the highest scale byte: no decoded value is subnormal in float32.
    """

    dtype: str = "uint8"
    signed: bool = True
    packed: bool = False
    nan_in_scale: bool = True
    for_second_moments: bool = True
    dithered: bool = False

    @property
    def half_gap(self) -> float:
        """See above."""
        raise NotImplementedError

    @property
    def carry(self) -> int:
        """See above."""
        raise NotImplementedError

    @property
    def scale_range(self) -> tuple[int, int]:
        """See above."""
        raise NotImplementedError

    def scale(self, block_max: np.ndarray) -> np.ndarray:
        """Return the scale bytes of blocks whose largest magnitudes are `block_max`: uint8."""
        bits = block_max.view(np.uint32).astype(np.int64)
        return np.clip(bits + self.carry >> 23, *self.scale_range).astype(np.uint8)

    def encode(
        self, x: np.ndarray, scale: np.ndarray | None, words: np.ndarray | None, nonzero: np.ndarray
    ) -> np.ndarray:
        """Round float32 to codes.

        Args:
            x: float32.
            scale: the scale byte of every element; None in a format without.
            words: uint32, or None for nearest.
            nonzero: bool: what is not stored as zero.
        """
        raise NotImplementedError

    def decode(
        self, codes: np.ndarray, scale: np.ndarray | None, words: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the float32 values: exact.

        Args:
            codes: of every element.
            scale: as in `encode`.
            words: with which dithered codes were made.
        """
        raise NotImplementedError


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
    """Floats with a sign and a scale: a code's number times 2^(byte - 127 - e) is what was stored.

    e is the exponent of the largest code.
    """

    @property
    def for_second_moments(self) -> bool:
        """With a scale, small numbers are lifted to the smallest, which is small enough."""
        return True

    @property
    def carry(self) -> int:
        """What is missing from the significand of the largest code to that of the next power of two."""
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
"""The integers as a float format whose every number is subnormal, with quantum 1: one rounding serves all.

The code of NaN is that of -0, which integers do not have.
"""


@dataclasses.dataclass(frozen=True)
class IntegerCodes(SignedCodes):
    """int8, from -127 to 127, in two's complement."""

    format: FloatFormat = INT8
    nan_in_scale = True

    @property
    def for_second_moments(self) -> bool:
        """What is lifted to 1/127 of the largest is lifted by orders."""
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
        """All binades of a block are those of normal float32 numbers."""
        return 2**self.format.exponent_bits - 1, 253

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return codes counted from the base of their block."""
        assert scale is not None
        return encode_unsigned(x, words, self.format, self.format.base(scale.astype(np.int64)))

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers from the base of their block up."""
        assert scale is not None
        return decode_unsigned(codes, self.format, self.format.base(scale.astype(np.int64)))


@dataclasses.dataclass(frozen=True)
class PlainUnsignedCodes(UnsignedCodes):
    """Unsigned floats from a fixed base up, with a code for NaN and no scale."""

    nan_in_scale = False

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return codes; of what is not finite, that of NaN."""
        codes = encode_unsigned(x, words, self.format, self.format.fixed_base)
        return np.where(np.isfinite(x), codes, NAN_CODE).astype(np.uint8)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers."""
        values = decode_unsigned(codes, self.format, self.format.fixed_base)
        return np.where(codes == NAN_CODE, np.float32(np.nan), values)


@dataclasses.dataclass(frozen=True)
class TableCodes(Codes):
    """Numbers of a table: that of a code times 2^(byte - 127) is what was stored.

    Attributes:
        table: of the codes.
    """

    table: Table

    @property
    def signed(self) -> bool:
        """As the table."""
        return self.table.signed

    @property
    def for_second_moments(self) -> bool:
        """A sign that is always the same costs half of the numbers, and the small ones."""
        return not self.table.signed

    @property
    def packed(self) -> bool:
        """Codes of 4 bits are."""
        return self.table.bits == 4

    @property
    def half_gap(self) -> float:
        """That of the numbers in the top decade."""
        return self.table.half_gap

    @property
    def carry(self) -> int:
        """That of the table."""
        return self.table.carry

    @property
    def scale_range(self) -> tuple[int, int]:
        """Half of the smallest number, and the inverse of the largest scale, are normal in float32."""
        return self.table.lowest, 253

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return the codes of x over its block's scale."""
        assert scale is not None
        with np.errstate(under="ignore", invalid="ignore", over="ignore"):
            y = np.ldexp(x, 127 - scale.astype(np.int32)).astype(np.float32)
        codes = encode_table(y, words, self.table)
        return np.where(nonzero & (codes == 0), np.uint8(1), codes) if self.table.has_zero else codes

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers times their block's scale."""
        assert scale is not None
        return np.ldexp(decode_table(codes, self.table), scale.astype(np.int32) - 127).astype(np.float32)


PLAIN_CODES: dict[str, Codes] = {
    "float32": PlainCodes(FLOAT_FORMATS["float32"]),
    "bfloat16": PlainCodes(FLOAT_FORMATS["bfloat16"]),
    "float16": PlainCodes(FLOAT_FORMATS["float16"]),
    "ufloat8_e6m2": PlainUnsignedCodes(UNSIGNED_FLOATS["ufloat8_e6m2"]),
}
"""By name: codes without a scale."""
SCALED_CODES: dict[str, Codes] = {
    "float16": SignedCodes(FLOAT_FORMATS["float16"]),
    "float8_e4m3fn": SignedCodes(FLOAT_FORMATS["float8_e4m3fn"]),
    "float8_e5m2": SignedCodes(FLOAT_FORMATS["float8_e5m2"]),
    "float8_e3m4": SignedCodes(FLOAT_FORMATS["float8_e3m4"]),
    "int8": IntegerCodes(),
    "ufloat8_e5m3": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e5m3"]),
    "ufloat8_e4m4": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e4m4"]),
}
"""By name: codes that `scaled` takes."""
CODEBOOK_CODES: dict[str, Codes] = {name: TableCodes(table) for name, table in TABLES.items()}
"""By name: codes that `codebook` takes."""
