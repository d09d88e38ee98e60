"""What the codes of a state format are: floats with a sign or without, integers, numbers of a table.

Contract: F5 to F10. Elementwise; which elements share a scale is not known here (`blocks.py`, `formats.py`).
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from halfstep_jax.numbers.exact import kept
from halfstep_jax.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_jax.numbers.rounding import round_and_cast, round_to_code
from halfstep_jax.storage.tables import TABLES, Table, decode_table, encode_table
from halfstep_jax.storage.unsigned_floats import (
    NAN_CODE,
    UNSIGNED_FLOATS,
    UnsignedFloat,
    decode_unsigned,
    encode_unsigned,
)

NAN_SCALE = np.uint8(255)
"""The scale byte of a block that holds a NaN which its codes cannot."""
_INFINITY = np.float32(np.inf)
_NAN = np.float32(np.nan).view(np.uint32)
_MANTISSA_BITS = np.uint32(23)
_SIGN = np.uint32(0x80000000)
_BIAS = 127


Mask = bool | jax.Array
"""Of all elements, or of each."""


class Codes(Protocol):
    """What a `Format` asks of its codes.

    `scale` is the scale byte of every element, uint8; None in a format without.
    """

    @property
    def dtype(self) -> str:
        """The dtype of the arrays."""
        ...

    @property
    def signed(self) -> bool:
        """Whether negative values can be stored."""
        ...

    @property
    def half_gap(self) -> float:
        """Half the largest relative gap between codes, above the subnormal range."""
        ...

    @property
    def packed(self) -> bool:
        """Whether codes are of 4 bits, two of them kept in a byte; they are packed by who calls."""
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
        """The lowest and the highest scale byte: no decoded value is subnormal in float32."""
        ...

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the scale bytes of blocks whose largest magnitudes are `block_max`."""
        ...

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Return the codes of float32 `x`; where `nonzero`, what is not zero is not stored as zero."""
        ...

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the float32 values of codes; `words`: with which dithered ones were made."""
        ...


class WithoutScale:
    """Codes that stand for their values by themselves."""

    packed = False
    dithered = False
    nan_in_scale = False
    scale_range = (0, 0)

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Refuse: a format without scales asks for none."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class PlainCodes(WithoutScale):
    """float32, bfloat16 or float16."""

    dtype: str
    signed: bool = True

    @property
    def for_second_moments(self) -> bool:
        """Squares go down to 1e-20: that takes the exponents of float32."""
        return self.dtype != "float16"

    @property
    def half_gap(self) -> float:
        """2^-(p + 1) for p bits of mantissa; float32 counts as without gaps."""
        return 2.0 ** -(FLOAT_FORMATS[self.dtype].mantissa_bits + 1) if self.dtype in FLOAT_FORMATS else 0.0

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round to the dtype."""
        return round_and_cast(x, self.dtype, words, saturate=True)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Cast."""
        return codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class PlainUnsignedCodes(WithoutScale):
    """Unsigned floats of a fixed base."""

    numbers: UnsignedFloat
    dtype: str = "uint8"
    signed: bool = False
    for_second_moments: bool = True

    @property
    def half_gap(self) -> float:
        """2^-(p + 1) for p bits of mantissa."""
        return 2.0 ** -(self.numbers.mantissa_bits + 1)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        codes = encode_unsigned(x, words, self.numbers, self.numbers.fixed_base)
        return jnp.where(jnp.abs(x) < _INFINITY, codes, NAN_CODE)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        values = decode_unsigned(codes, self.numbers, self.numbers.fixed_base)
        return jnp.where(codes == NAN_CODE, np.float32(np.nan), values)


@dataclasses.dataclass(frozen=True)
class SignedCodes:
    """Floats with a sign: the code of y stands for y 2^(byte - 127 - e), e the exponent of the largest code.

    Codes are made and read as integers, but read by a cast on a TPU. XLA on CPU has casts to and from 8-bit
    floats, and selects between them, but ten times slower; only the bitcast at the end and the one at the
    beginning know the dtype.
    """

    numbers: FloatFormat
    signed: bool = True
    packed: bool = False
    nan_in_scale: bool = False
    dithered: bool = False
    for_second_moments: bool = True

    @property
    def dtype(self) -> str:
        """That of the format."""
        return self.numbers.name

    @property
    def half_gap(self) -> float:
        """2^-(p + 1) for p bits of mantissa."""
        return 2.0 ** -(self.numbers.mantissa_bits + 1)

    @property
    def scale_range(self) -> tuple[int, int]:
        """From the byte under which the smallest code would decode to a subnormal float32."""
        return self._top_exponent - math.frexp(self.numbers.smallest)[1] + 2, 254

    @property
    def nan(self) -> np.ndarray:
        """The code of NaN, as an unsigned integer."""
        return np.array(np.nan, _numpy_dtype(self.dtype)).view(np.dtype(self._bits))

    @property
    def _top_exponent(self) -> int:
        return math.frexp(self.numbers.max)[1] - 1

    @property
    def _bits(self) -> type:
        return jnp.uint16 if np.dtype(_numpy_dtype(self.dtype)).itemsize == 2 else jnp.uint8

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the exponent field of the power of two to which the largest magnitude fits."""
        # The carry takes a maximum past the largest code to the next exponent.
        carry = np.uint32(0x7FFFFF) - (np.float32(self.numbers.max).view(np.uint32) & np.uint32(0x7FFFFF))
        byte = (lax.bitcast_convert_type(block_max, jnp.uint32) + carry) >> _MANTISSA_BITS
        return jnp.clip(byte, *self.scale_range).astype(jnp.uint8)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        width = 8 * np.dtype(self._bits).itemsize
        code = self.magnitude(x, scale, words, nonzero).astype(jnp.uint32)
        sign = lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31) << np.uint32(width - 1)
        finite, bits = jnp.abs(x) < _INFINITY, (code | sign).astype(self._bits)
        return lax.platform_dependent(
            finite, bits, cpu=self._select_once, tpu=self._select_floats, default=self._select_bits
        )

    def _select_once(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Do as `_select_bits`. What ends in a bitcast, XLA on CPU makes again where codes are read."""
        return lax.bitcast_convert_type(kept(jnp.where(finite, bits, self.nan)), self.dtype)

    def _select_bits(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Return the codes of magnitudes and signs, NaN where the value was not finite."""
        return lax.bitcast_convert_type(jnp.where(finite, bits, self.nan), self.dtype)

    def _select_floats(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Do as `_select_bits`. Where the last operation is a bitcast, XLA on TPU writes both sides of it."""
        nan = np.array(np.nan, _numpy_dtype(self.dtype))
        return jnp.where(finite, lax.bitcast_convert_type(bits, self.dtype), nan)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        if self._bits == jnp.uint8:
            numbers = lax.platform_dependent(codes, tpu=cast, default=self._decoded)
        else:
            numbers = self._decoded(codes)
        return numbers * self._unit(scale)

    def _decoded(self, codes: jax.Array) -> jax.Array:
        """Return the numbers of codes, read as integers."""
        return self.decode_bits(lax.bitcast_convert_type(codes, self._bits))

    def decode_bits(self, bits: jax.Array) -> jax.Array:
        """Return the numbers of codes, given as unsigned integers: the values under a scale of one."""
        width = 8 * bits.dtype.itemsize
        bits = bits.astype(jnp.uint32)
        value = self._value(bits & np.uint32(2 ** (width - 1) - 1))
        sign = (bits << np.uint32(32 - width)) & _SIGN
        return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32)

    def magnitude(self, x, scale, words, nonzero) -> jax.Array:
        """Return the codes of |x|, finite, in int32; `scale` of every element, or one for all."""
        inverse = np.uint32(2 * _BIAS + self._top_exponent) - scale.astype(jnp.uint32)
        # Of a magnitude: XLA on CPU computes x again, where it would keep an x that meets its own scale.
        code = round_to_code(jnp.abs(x) * _power_of_two(inverse), self.numbers, words)
        return (
            code if nonzero is False else jnp.where(must_not_vanish(x, nonzero), jnp.maximum(code, 1), code)
        )

    def _value(self, magnitude: jax.Array) -> jax.Array:
        """Return the float32 values of the codes of magnitudes; NaN for what is past the largest."""
        fmt, first_normal = self.numbers, np.float32(2.0**self.numbers.min_exponent)
        bits = (magnitude << np.uint32(23 - fmt.mantissa_bits)) + first_normal.view(np.uint32)
        # Of a normal number these are the bits of its double, and of a subnormal one those of its sum with
        # the smallest normal number; that difference is exact. The lesser of what either rule gives is right.
        subnormal = lax.bitcast_convert_type(bits, jnp.float32) - first_normal
        normal = (bits - (np.uint32(1) << _MANTISSA_BITS)).astype(jnp.int32)
        lesser = jnp.minimum(lax.bitcast_convert_type(subnormal, jnp.int32), normal)
        value = lax.bitcast_convert_type(lesser, jnp.float32)
        return jnp.where(magnitude > fmt.max_code, np.float32(np.nan), value)

    def _unit(self, scale: jax.Array) -> jax.Array:
        """Return what the code of 1 stands for: 2^(byte - 127 - e); NaN in a marked block."""
        return _unit(scale, self._top_exponent)


INT8 = FloatFormat("int8", mantissa_bits=7, min_exponent=7, max=127.0, has_infinity=False)
"""The integers as floats that are all subnormal, with 1 for the smallest: one rounding serves all."""


@dataclasses.dataclass(frozen=True)
class IntegerCodes(SignedCodes):
    """int8, from -127 to 127."""

    numbers: FloatFormat = INT8
    nan_in_scale: bool = True
    for_second_moments: bool = False

    @property
    def half_gap(self) -> float:
        """1/254: of all gaps, that below the largest code."""
        return 1 / (2 * self.numbers.max)

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the exponent field of the power of two to which the largest magnitude fits."""
        return jnp.where(block_max < _INFINITY, super().scale(block_max), NAN_SCALE)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        code = self.magnitude(x, scale, words, nonzero)
        negative = lax.bitcast_convert_type(x, jnp.int32) < 0
        return jnp.where(scale == NAN_SCALE, np.int8(0), jnp.where(negative, -code, code).astype(jnp.int8))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return codes.astype(jnp.float32) * self._unit(scale)


@dataclasses.dataclass(frozen=True)
class UnsignedCodes:
    """Unsigned floats whose base is their block's."""

    numbers: UnsignedFloat
    dtype: str = "uint8"
    signed: bool = False
    packed: bool = False
    nan_in_scale: bool = True
    dithered: bool = False
    for_second_moments: bool = True

    @property
    def half_gap(self) -> float:
        """2^-(p + 1) for p bits of mantissa."""
        return 2.0 ** -(self.numbers.mantissa_bits + 1)

    @property
    def scale_range(self) -> tuple[int, int]:
        """From the byte whose block has a normal number for its smallest."""
        return 2**self.numbers.exponent_bits - 1, 253

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the exponent field of the power of two to which the largest magnitude fits."""
        byte = lax.bitcast_convert_type(block_max, jnp.uint32) >> _MANTISSA_BITS
        return jnp.where(
            block_max < _INFINITY, jnp.clip(byte, *self.scale_range).astype(jnp.uint8), NAN_SCALE
        )

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round; they never store as zero what is not."""
        del nonzero
        codes = encode_unsigned(x, words, self.numbers, self.numbers.base(scale))
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        values = decode_unsigned(codes, self.numbers, self.numbers.base(scale))
        return jnp.where(scale == NAN_SCALE, np.float32(np.nan), values)


@dataclasses.dataclass(frozen=True)
class TableCodes:
    """Numbers of a table: that of a code stands for number 2^(byte - 127)."""

    table: Table
    dtype: str = "uint8"
    nan_in_scale: bool = True
    dithered: bool = False

    @property
    def for_second_moments(self) -> bool:
        """A sign that is always the same costs half of the numbers, and the small ones."""
        return not self.table.signed

    @property
    def signed(self) -> bool:
        """Whether the table is."""
        return self.table.signed

    @property
    def packed(self) -> bool:
        """Whether codes are of 4 bits."""
        return self.table.bits == 4

    @property
    def half_gap(self) -> float:
        """That of the table."""
        return self.table.largest_gap / 2

    @property
    def scale_range(self) -> tuple[int, int]:
        """So that half of the smallest number is normal, and the inverse of the largest scale."""
        # An average that decays from the smallest number passes half of it.
        return 3 - math.frexp(self.table.smallest)[1], 253

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the exponent field of the power of two to which the largest magnitude fits."""
        # A maximum fits on either side of zero: a signed table ends short of -1.
        fraction, exponent = math.frexp(self.table.shorter_end)
        past = np.uint32(0x7FFFFF) - (np.float32(fraction).view(np.uint32) & np.uint32(0x7FFFFF))
        byte = (lax.bitcast_convert_type(block_max, jnp.uint32) + past) >> _MANTISSA_BITS
        byte = byte + np.uint32(1 - exponent)
        return jnp.where(
            block_max < _INFINITY, jnp.clip(byte, *self.scale_range).astype(jnp.uint8), NAN_SCALE
        )

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        y = x * _power_of_two(np.uint32(2 * _BIAS) - scale.astype(jnp.uint32))
        codes = encode_table(y, words, self.table)
        if nonzero is not False and self.table.has_zero:
            codes = jnp.where(must_not_vanish(x, nonzero) & (codes == 0), np.uint8(1), codes)
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return decode_table(codes, self.table) * _unit(scale, 0)


PLAIN_CODES: dict[str, Codes] = {
    "float32": PlainCodes("float32"),
    "bfloat16": PlainCodes("bfloat16"),
    "float16": PlainCodes("float16"),
    "ufloat8_e6m2": PlainUnsignedCodes(UNSIGNED_FLOATS["ufloat8_e6m2"]),
}
SCALED_CODES: dict[str, Codes] = {
    "float16": SignedCodes(FLOAT_FORMATS["float16"]),
    "float8_e4m3fn": SignedCodes(FLOAT_FORMATS["float8_e4m3fn"]),
    "float8_e5m2": SignedCodes(FLOAT_FORMATS["float8_e5m2"]),
    "float8_e3m4": SignedCodes(FLOAT_FORMATS["float8_e3m4"]),
    "int8": IntegerCodes(),
    "ufloat8_e5m3": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e5m3"]),
    "ufloat8_e4m4": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e4m4"]),
}
CODEBOOK_CODES: dict[str, Codes] = {name: TableCodes(table) for name, table in TABLES.items()}


def _numpy_dtype(name: str):
    return getattr(ml_dtypes, name) if name.startswith("float8") else name


def must_not_vanish(x: jax.Array, nonzero: Mask) -> jax.Array:
    """Tell what must not be stored as zero."""
    # By the bits of x: XLA on CPU takes a subnormal number for zero.
    return (lax.bitcast_convert_type(x, jnp.int32) > 0) & nonzero


def _power_of_two(field: jax.Array) -> jax.Array:
    """Return the power of two with the exponent field `field`, uint32."""
    return lax.bitcast_convert_type(field << _MANTISSA_BITS, jnp.float32)


def cast(codes: jax.Array) -> jax.Array:
    """Return the numbers of 8-bit floats by one operation: what takes many XLA on TPU does not do twice."""
    return codes.astype(jnp.float32)


def _unit(scale: jax.Array, down: int) -> jax.Array:
    """Return the power of two of exponent field `scale` - `down`; NaN in a marked block."""
    field = scale.astype(jnp.uint32) - np.uint32(down)
    return lax.platform_dependent(scale, field, tpu=_marked_by_bits, default=_marked_by_select)


def _marked_by_select(scale: jax.Array, field: jax.Array) -> jax.Array:
    return jnp.where(scale == NAN_SCALE, np.float32(np.nan), _power_of_two(field))


def _marked_by_bits(scale: jax.Array, field: jax.Array) -> jax.Array:
    """Do as `_marked_by_select`, without a select, which XLA on TPU keeps in memory for every element."""
    nan = (scale == NAN_SCALE).astype(jnp.uint32) * _NAN
    return lax.bitcast_convert_type((field << _MANTISSA_BITS) | nan, jnp.float32)
