"""How a state array is stored: encode float32 to codes and scales, decode them to float32.

Contract: section F. Vectors: formats, codebook, adam. A `Format` is all that a transform knows of storage.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_spec.numbers.rounding import decode, encode_float, round_to
from halfstep_spec.storage.blocks import block_maximum, pack, per_element, unpack
from halfstep_spec.storage.tables import TABLES, decode_table, encode_table
from halfstep_spec.storage.unsigned_floats import NAN_CODE, UNSIGNED_FLOATS, decode_unsigned, encode_unsigned

PLAIN_STATE_DTYPES = ("float32", "bfloat16", "float16", "ufloat8_e6m2")
SCALED_DTYPES = ("float16", "float8_e4m3fn", "float8_e5m2", "int8", "ufloat8_e5m3", "ufloat8_e4m4")
MARKED = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""

# The integers as a float format whose every number is subnormal, with quantum 1: one rounding serves all.
_INT8 = FloatFormat("int8", 0, 7, -6, 127, 127, 0)


class Encoded(NamedTuple):
    """A stored array.

    Attributes:
        codes: patterns, in the array's shape, or, of 4 bits, two to a byte.
        scale: uint8, one per block; None in a format without.
        shape: of the array; None where that is the shape of the codes.
    """

    codes: np.ndarray
    scale: np.ndarray | None
    shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store an array of float32.

    Attributes:
        dtype: of the codes: one of `PLAIN_STATE_DTYPES`, or with a scale one of `SCALED_DTYPES` or `TABLES`.
        scaled: whether blocks have a scale.
        block_size: elements of a block, "row" or None.
        min_size: smaller arrays are kept in float32.
        min_ndim: so are arrays of fewer axes.
    """

    dtype: str
    scaled: bool = False
    block_size: int | str | None = 128
    min_size: int = 4096
    min_ndim: int = 2

    def for_shape(self, shape: tuple[int, ...]) -> "Format":
        """Return the format that an array of this shape gets: float32 where it is too small for a scale."""
        small = math.prod(shape) < self.min_size or len(shape) < self.min_ndim
        return Format("float32") if self.scaled and small else self

    def zeros(self, shape: tuple[int, ...]) -> Encoded:
        """Return the codes and scales of zeros."""
        return self.encode(np.zeros(shape, np.float32), None)

    def encode(self, x: np.ndarray, words: np.ndarray | None, *, positive: bool | None = False) -> Encoded:
        """Round the float32 `x` to codes.

        Finite values saturate, infinity becomes NaN (contract R6). With a scale: y = x / 2^s, exact, s from
        the largest magnitude of the block, then y is rounded.

        Args:
            x: float32.
            words: uint32 words for stochastic rounding, or None for nearest.
            positive: a second moment: what is not zero is not stored as zero. None: so in blocks without a
                negative number (contract S4).
        """
        if self.dtype in UNSIGNED_FLOATS:
            return self._encode_unsigned(x, words)
        if not self.scaled:
            return Encoded(round_to(x, self.dtype, words, saturate=True), None)
        kept = (x > 0) & (self._without_negative(x) if positive is None else positive)
        scale = self._scale_bytes(x)
        exponent = self._exponent(scale, x.shape)
        with np.errstate(under="ignore", invalid="ignore", over="ignore"):
            y = np.ldexp(x, -exponent).astype(np.float32)
        if self.dtype in TABLES:
            return self._mark(x, self._encode_table(y, words, kept), scale)
        codes = encode_float(y, self._float_format, words, saturate=True)
        codes = np.where(kept & (codes == 0), 1, codes).astype(codes.dtype)
        if self.dtype != "int8":
            return Encoded(codes, scale)
        twos_complement = np.where(codes >= 128, 128 - codes.astype(np.int64), codes).astype(np.int8)
        return self._mark(x, twos_complement.view(np.uint8), scale)

    def decode(self, stored: Encoded) -> np.ndarray:
        """Return the float32 values of codes and scales: exact."""
        codes, scale, shape = stored
        if scale is None:
            if self.dtype not in UNSIGNED_FLOATS:
                return decode(codes, self.dtype)
            values = decode_unsigned(
                codes, UNSIGNED_FLOATS[self.dtype], self._unsigned_base(None, codes.shape)
            )
            return np.where(codes == NAN_CODE, np.float32(np.nan), values)
        if self._packed:
            assert shape is not None
            codes = unpack(codes, shape, self.block_size)
        marked = per_element(scale, codes.shape, self.block_size) == MARKED
        if self.dtype in UNSIGNED_FLOATS:
            base = self._unsigned_base(np.where(scale == MARKED, 128, scale), codes.shape)
            values = decode_unsigned(codes, UNSIGNED_FLOATS[self.dtype], base)
        else:
            with np.errstate(over="ignore"):
                values = np.ldexp(self._numbers(codes), self._exponent(scale, codes.shape)).astype(np.float32)
        return np.where(marked, np.float32(np.nan), values)

    def freezes(self, b) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short: 1 - b < half the relative gap.

        The gap is 2^-p for p explicit mantissa bits, 1/127 for int8 (that below its largest code), and for
        tables the largest in the top decade. float32 is taken as never freezing.
        """
        if self.dtype == "float32":
            return False
        if self.dtype in TABLES:
            half_gap = TABLES[self.dtype].half_gap
        else:
            half_gap = 0.5 / 127 if self.dtype == "int8" else 2.0 ** -(self._mantissa_bits + 1)
        return bool(np.float32(1) - np.float32(b) < np.float32(half_gap))

    @property
    def code_dtype(self) -> str:
        """The label of the codes in golden vectors."""
        return "uint8" if self.dtype in UNSIGNED_FLOATS or self.dtype in TABLES else self.dtype

    @property
    def signed(self) -> bool:
        """Whether negative values can be stored."""
        return not (self.dtype in UNSIGNED_FLOATS or (self.dtype in TABLES and not TABLES[self.dtype].signed))

    @property
    def _packed(self) -> bool:
        return self.dtype in TABLES and TABLES[self.dtype].bits == 4

    @property
    def _float_format(self) -> FloatFormat:
        return _INT8 if self.dtype == "int8" else FLOAT_FORMATS[self.dtype]

    @property
    def _mantissa_bits(self) -> int:
        table = UNSIGNED_FLOATS if self.dtype in UNSIGNED_FLOATS else FLOAT_FORMATS
        return table[self.dtype].mantissa_bits

    @property
    def _top(self) -> tuple[int, int, int, int]:
        """Return (exponent of the largest code, carry, lowest byte, highest byte).

        The carry, added to the pattern of a maximum, brings it to the next exponent if it is past the largest
        code. Below the lowest byte the smallest code would decode to a subnormal float32; above the highest
        the inverse of the scale would be one.
        """
        if self.dtype in TABLES:
            return 0, TABLES[self.dtype].carry, TABLES[self.dtype].lowest, 253
        fmt = self._float_format
        if self.dtype == "int8":
            return 6, 0x01FFFF, 7, 254
        exponent = (fmt.max_code >> fmt.mantissa_bits) - fmt.bias
        mantissa = fmt.max_code & ((1 << fmt.mantissa_bits) - 1)
        carry = 0x7FFFFF - (mantissa << (23 - fmt.mantissa_bits))
        smallest = 1 - fmt.bias - fmt.mantissa_bits
        return exponent, carry, 127 + exponent - 126 - smallest, 254

    def _scale_bytes(self, x: np.ndarray) -> np.ndarray:
        _, carry, lowest, highest = self._top
        bits = block_maximum(x, self.block_size).view(np.uint32).astype(np.int64)
        return np.clip(bits + carry >> 23, lowest, highest).astype(np.uint8)

    def _exponent(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return s of every element: a code's value times 2^s is what was stored."""
        return per_element(scale, shape, self.block_size).astype(np.int32) - 127 - self._top[0]

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        """Return what codes stand for before they are scaled."""
        if self.dtype in TABLES:
            return decode_table(codes, TABLES[self.dtype])
        return codes.view(np.int8).astype(np.float32) if self.dtype == "int8" else decode(codes, self.dtype)

    def _encode_table(self, y: np.ndarray, words, kept: np.ndarray) -> np.ndarray:
        table = TABLES[self.dtype]
        codes = encode_table(y, words, table)
        return np.where(kept & (codes == 0), np.uint8(1), codes) if table.has_zero else codes

    def _without_negative(self, x: np.ndarray) -> np.ndarray:
        """Tell of every element whether its block holds no negative number."""
        negative = block_maximum((x < 0).astype(np.float32), self.block_size)
        return per_element(negative == 0, x.shape, self.block_size)

    def _unsigned_base(self, scale: np.ndarray | None, shape: tuple[int, ...]):
        fmt = UNSIGNED_FLOATS[self.dtype]
        if scale is None:
            assert fmt.fixed is not None
            return fmt.fixed << fmt.mantissa_bits
        return fmt.base(per_element(scale, shape, self.block_size).astype(np.int64))

    def _encode_unsigned(self, x: np.ndarray, words: np.ndarray | None) -> Encoded:
        fmt = UNSIGNED_FLOATS[self.dtype]
        if not self.scaled:
            codes = encode_unsigned(x, words, fmt, self._unsigned_base(None, x.shape))
            return Encoded(np.where(np.isfinite(x), codes, NAN_CODE).astype(np.uint8), None)
        top = block_maximum(x, self.block_size).view(np.uint32).astype(np.int64)
        scale = np.clip(top >> 23, 2**fmt.exponent_bits - 1, 253).astype(np.uint8)
        return self._mark(x, encode_unsigned(x, words, fmt, self._unsigned_base(scale, x.shape)), scale)

    def _mark(self, x: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> Encoded:
        """Mark blocks with a NaN or an infinity; their codes are 0."""
        finite = block_maximum(np.where(np.isfinite(x), np.float32(0), np.float32(1)), self.block_size) == 0
        scale = np.where(finite, scale, MARKED).astype(np.uint8)
        marked = per_element(scale, x.shape, self.block_size) == MARKED
        codes = np.where(marked, 0, codes).astype(codes.dtype)
        return (
            Encoded(pack(codes, self.block_size), scale, x.shape) if self._packed else Encoded(codes, scale)
        )


def as_format(dtype: "str | Format") -> Format:
    """Return the `Format` of a plain state dtype; a `Format` is returned as it is."""
    if isinstance(dtype, Format):
        return dtype
    if dtype not in PLAIN_STATE_DTYPES:
        raise ValueError(f"as_format: dtype={dtype} cannot hold a state without a scale.")
    return Format(dtype)


def scaled(dtype: str, block_size: int | str | None = 128, min_size: int = 4096, min_ndim: int = 2) -> Format:
    """Return the format of codes of `dtype` with one power-of-two scale per block."""
    if dtype not in SCALED_DTYPES:
        raise ValueError(f"scaled: dtype={dtype} is none of {', '.join(SCALED_DTYPES)}.")
    return Format(dtype, True, block_size, min_size, min_ndim)


def codebook(
    table: str, block_size: int | str | None = 128, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of codes of a table with one power-of-two scale per block."""
    if table not in TABLES:
        raise ValueError(f"codebook: table={table!r} is none of {', '.join(TABLES)}.")
    if TABLES[table].bits == 4 and isinstance(block_size, int) and block_size % 2:
        raise ValueError(f"codebook: block_size={block_size} is odd; codes of 4 bits stand two to a byte.")
    return Format(table, True, block_size, min_size, min_ndim)
