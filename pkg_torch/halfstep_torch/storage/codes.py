"""What the codes of a state format are: floats with a sign or without, integers, numbers of a table.

Contract: F3, F5 to F10. Elementwise; which elements share a scale is not known here (`blocks.py` and
`formats.py` know it).
"""

import dataclasses
import math
from typing import Protocol

import torch
from torch import Tensor

from halfstep_torch.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_torch.numbers.patterns import from_patterns, to_patterns
from halfstep_torch.numbers.rounding import round_value, rounded
from halfstep_torch.storage.tables import TABLES, Table, decode_table, encode_table
from halfstep_torch.storage.unsigned_floats import (
    NAN_CODE,
    UNSIGNED_FLOATS,
    UnsignedFloat,
    decode_unsigned,
    encode_unsigned,
    round_unsigned,
)

_NAN = 0x7FC00000
NAN_SCALE = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""


class Codes(Protocol):
    """What a `Format` asks of its codes.

    Scales are int32 bytes, of a shape that broadcasts with the values; None in a format without.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the arrays."""
        ...

    @property
    def signed(self) -> bool:
        """Whether they hold negative values."""
        ...

    @property
    def half_gap(self) -> tuple[float, str]:
        """Half the largest relative gap between codes, as a number and in words (contract F3)."""
        ...

    @property
    def packed(self) -> bool:
        """Whether they are of 4 bits, two of them kept in a byte; they are packed by who calls."""
        ...

    @property
    def nan_in_scale(self) -> bool:
        """Whether a NaN marks its block, since there is no code for it."""
        ...

    @property
    def for_second_moments(self) -> bool:
        """Whether small positive numbers are held well enough beside large ones."""
        ...

    @property
    def dithered(self) -> bool:
        """Whether one word serves all elements, and is asked for again by `decode`."""
        ...

    @property
    def scale_range(self) -> tuple[int, int]:
        """The lowest and the highest scale byte; `NAN_SCALE` apart."""
        ...

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the scale of blocks whose largest magnitudes are `block_max`."""
        ...

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Round float32 to the numbers that codes are: float32 or int32, for a cast to `dtype`."""
        ...

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return what `encode` gives, and what it decodes to, in a format without a scale."""
        ...

    def to_wide(self, codes: Tensor) -> Tensor:
        """Undo the cast."""
        ...

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the float32 values: exact; `words` are those with which dithered codes were made."""
        ...


class RoundTrip:
    """Codes whose values are those that they decode to, for want of a shorter way."""

    def round_trip(self: Codes, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return what `encode` gives, and what it decodes to, in a format without a scale."""
        wide = self.encode(x, None, words, nonzero)
        return wide, self.decode(self.to_wide(wide), None)


@dataclasses.dataclass(frozen=True)
class SignedCodes(RoundTrip):
    """Floats with a sign and a scale, and integers.

    Attributes:
        format: of the codes; the integers are a float format whose every number is subnormal, with quantum 1.
        exponent: of the largest code.
        carry: what brings the pattern of a maximum past the largest code to the next exponent.
        lowest: the byte under which the smallest code would decode to a subnormal float32.
    """

    format: FloatFormat
    exponent: int
    carry: int
    lowest: int
    signed = True
    packed = False
    dithered = False

    @property
    def for_second_moments(self) -> bool:
        """Integers lift what is small by orders."""
        return not self.nan_in_scale

    @property
    def dtype(self) -> torch.dtype:
        """That of the format."""
        return self.format.dtype

    @property
    def half_gap(self) -> tuple[float, str]:
        """2^-(p + 1) for p explicit mantissa bits; 1/254 for int8: that below its largest code."""
        if self.nan_in_scale:
            return 1 / 254, "1/254"
        return 2.0 ** -(self.format.mantissa_bits + 1), f"2^-{self.format.mantissa_bits + 1}"

    @property
    def nan_in_scale(self) -> bool:
        """Integers have no NaN."""
        return not self.dtype.is_floating_point

    @property
    def scale_range(self) -> tuple[int, int]:
        """No decoded value is subnormal in float32, and none is infinite."""
        return self.lowest, 254

    def scale(self, block_max: Tensor) -> Tensor:
        """Return (bits(block_max) + c) >> 23: the smallest power of two under which `block_max` fits."""
        return (block_max.view(torch.int32) + self.carry >> 23).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x / 2^s, rounded."""
        assert scale is not None
        # Powers of two within the normal numbers of float32, both ways: the product is exact.
        y = x * ((254 + self.exponent - scale) << 23).view(torch.float32)
        codes = rounded(y, self.format, words, saturate=True)
        if nonzero is False:
            return codes
        smallest = 2.0 ** (self.format.min_exponent - self.format.mantissa_bits)
        return torch.where((x > 0) & (codes == 0) & nonzero, smallest, codes)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return float32."""
        return codes.to(torch.float32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return codes times 2^s."""
        assert scale is not None
        unit = ((scale - self.exponent) << 23).view(torch.float32)
        return wide * torch.where(scale == NAN_SCALE, math.nan, unit)


class PatternCodes(SignedCodes):
    """Floats for which torch has no dtype: their patterns."""

    @property
    def nan_in_scale(self) -> bool:
        """Patterns have a NaN."""
        return False

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the patterns of x / 2^s, rounded."""
        return to_patterns(super().encode(x, scale, words, nonzero), self.format)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return the numbers of the patterns."""
        return from_patterns(codes.to(torch.int32), self.format)


@dataclasses.dataclass(frozen=True)
class UnsignedCodes(RoundTrip):
    """Floats without a sign, of 8 bits.

    Attributes:
        format: of the codes.
    """

    format: UnsignedFloat
    dtype = torch.uint8
    signed = False
    packed = False
    dithered = False
    for_second_moments = True

    @property
    def nan_in_scale(self) -> bool:
        """Where there is a scale, all codes are numbers."""
        return self.format.fixed is None

    @property
    def half_gap(self) -> tuple[float, str]:
        """2^-(M + 1)."""
        return 2.0 ** -(self.format.mantissa_bits + 1), f"2^-{self.format.mantissa_bits + 1}"

    @property
    def scale_range(self) -> tuple[int, int]:
        """All binades of a block are those of normal float32 numbers."""
        return 2**self.format.exponent_bits - 1, 253

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the exponent field of `block_max`: one binade of room is left above it."""
        return (block_max.view(torch.int32) >> 23).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return codes counted from the base of their block; only zero gets 0."""
        return encode_unsigned(x, words, self.format, self._base(scale))

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the codes, and the numbers, which rounding knows without them."""
        return round_unsigned(x, words, self.format, self._base(None))

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers from the base of their block up."""
        values = decode_unsigned(wide, self.format, self._base(scale))
        if scale is not None:
            return torch.where(scale == NAN_SCALE, math.nan, values)
        nan = ((NAN_CODE - 1 - wide) >> 31) & _NAN
        return (values.view(torch.int32) | nan).view(torch.float32)

    def _base(self, scale: Tensor | None):
        """Return what code 0 stands on: of every block, or one for all."""
        return self.format.base(scale) if scale is not None else self.format.fixed_base


@dataclasses.dataclass(frozen=True)
class TableCodes(RoundTrip):
    """Numbers of a table.

    Attributes:
        table: of the codes.
    """

    table: Table
    dtype = torch.uint8
    nan_in_scale = True
    dithered = False

    @property
    def for_second_moments(self) -> bool:
        """A sign that is always the same costs half of the numbers, and the small ones."""
        return not self.table.signed

    @property
    def signed(self) -> bool:
        """As the table."""
        return self.table.signed

    @property
    def packed(self) -> bool:
        """As the table."""
        return self.table.packed

    @property
    def half_gap(self) -> tuple[float, str]:
        """The largest in the top decade."""
        exponent = -math.log2(self.table.half_gap)
        words = f"2^-{exponent:.0f}" if exponent.is_integer() else f"1/{1 / self.table.half_gap:.4g}"
        return self.table.half_gap, words

    @property
    def scale_range(self) -> tuple[int, int]:
        """Half of the smallest number, and the inverse of the largest scale, are normal in float32."""
        return self.table.lowest, 253

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the exponent field of the smallest power of two under which `block_max` fits the table."""
        carry, step = self.table.past
        return ((block_max.view(torch.int32) + carry >> 23) + step).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the codes of x over its block's scale."""
        assert scale is not None
        codes = encode_table(x * ((254 - scale) << 23).view(torch.float32), words, self.table)
        if nonzero is False or not self.table.has_zero:
            return codes
        return torch.where((x > 0) & (codes == 0) & nonzero, 1, codes)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers times their block's scale."""
        assert scale is not None
        unit = torch.where(scale == NAN_SCALE, math.nan, (scale << 23).view(torch.float32))
        return decode_table(wide, self.table) * unit


@dataclasses.dataclass(frozen=True)
class PlainCodes(RoundTrip):
    """Floats as they are, with no scale.

    Attributes:
        name: "float32", "bfloat16" or "float16".
    """

    name: str
    signed = True
    packed = False
    nan_in_scale = False
    dithered = False
    scale_range = (0, 0)

    @property
    def for_second_moments(self) -> bool:
        """Squares go down to 1e-20: that takes the exponents of float32."""
        return self.name != "float16"

    @property
    def dtype(self) -> torch.dtype:
        """That of the name."""
        return getattr(torch, self.name)

    @property
    def half_gap(self) -> tuple[float, str]:
        """As of `SignedCodes`; float32 is taken as having none."""
        if self.name == "float32":
            return 0.0, "0"
        bits = FLOAT_FORMATS[self.name].mantissa_bits
        return 2.0 ** -(bits + 1), f"2^-{bits + 1}"

    def scale(self, block_max: Tensor) -> Tensor:
        """Not for these."""
        raise NotImplementedError

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return x, rounded."""
        return round_value(x, self.name, words, saturate=True)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return float32."""
        return codes.to(torch.float32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers themselves."""
        return wide


INT8 = FloatFormat(torch.int8, 7, 7, 127.0, math.nan)
"""The integers as a float format whose every number is subnormal, with quantum 1: one rounding serves all."""

PLAIN_CODES: dict[str, Codes] = {
    "float32": PlainCodes("float32"),
    "bfloat16": PlainCodes("bfloat16"),
    "float16": PlainCodes("float16"),
    "ufloat8_e6m2": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e6m2"]),
}
SCALED_CODES: dict[str, Codes] = {
    "float16": SignedCodes(FLOAT_FORMATS["float16"], 15, 0x1FFF, 40),
    "float8_e4m3fn": SignedCodes(FLOAT_FORMATS["float8_e4m3fn"], 8, 0x1FFFFF, 18),
    "float8_e5m2": SignedCodes(FLOAT_FORMATS["float8_e5m2"], 15, 0x1FFFFF, 32),
    "float8_e3m4": PatternCodes(FLOAT_FORMATS["float8_e3m4"], 3, 0x7FFFF, 10),
    "int8": SignedCodes(INT8, 6, 0x1FFFF, 7),
    "ufloat8_e5m3": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e5m3"]),
    "ufloat8_e4m4": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e4m4"]),
}
"""Codes that `scaled` takes; F5 has the constants: exponent of the largest code, carry and lowest byte."""
CODEBOOK_CODES: dict[str, Codes] = {name: TableCodes(table) for name, table in TABLES.items()}
"""Codes that `codebook` takes."""
