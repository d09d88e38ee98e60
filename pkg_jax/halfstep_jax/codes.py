"""What the codes of a state format are: floats with a sign, integers, floats without a sign.

Contract: F5 to F7. Elementwise; which elements share a scale is not known here (`blocks.py`, `formats.py`).
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_jax.rounding import cast_rounded, round_to_grid
from halfstep_jax.unsigned_floats import (
    NAN_CODE,
    UNSIGNED_FLOATS,
    UnsignedFloat,
    decode_unsigned,
    encode_unsigned,
)

MARKED = np.uint8(255)
"""The scale byte of a block that holds a NaN which its codes cannot."""
_MANTISSA_BITS = np.uint32(23)
_BIAS = 127


class Codes(Protocol):
    """What a `Format` asks of its codes.

    Attributes:
        dtype: of the arrays.
        signed: whether they hold negative values.
        resolution: two over the largest relative gap between them, above the subnormal range.
        marks: whether a NaN marks its block.
        lowest: the lowest scale byte: no decoded value is subnormal in float32.
        highest: the highest.
    """

    dtype: str
    signed: bool
    resolution: float
    marks: bool
    lowest: int
    highest: int

    def scale(self, top: jax.Array) -> jax.Array:
        """Return the scale bytes of blocks whose largest magnitudes are `top`."""
        ...

    def encode(self, x: jax.Array, scale: jax.Array | None, words: jax.Array | None, positive: bool):
        """Return the codes of float32 `x`, given the scale byte of every element; None for no scale."""
        ...

    def decode(self, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Return the float32 values of codes."""
        ...


@dataclasses.dataclass(frozen=True)
class _Float32Codes:
    """float32 itself: finite or NaN, nothing else changes."""

    dtype: str = "float32"
    signed: bool = True
    resolution: float = 2.0**24
    marks: bool = False
    lowest: int = 0
    highest: int = 0

    def scale(self, top: jax.Array) -> jax.Array:
        raise NotImplementedError("float32 has no scale")

    def encode(self, x: jax.Array, scale: jax.Array | None, words: jax.Array | None, positive: bool):
        del scale, words, positive
        return jnp.where(jnp.abs(x) < np.float32(np.inf), x, np.float32(np.nan))

    def decode(self, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        del scale
        return codes


@dataclasses.dataclass(frozen=True)
class _FloatCodes:
    """Floats with a sign, or integers, taken as floats that are all subnormal: alone or with a scale.

    With a scale, the code of y stands for y 2^(byte - 127 - e), e the exponent of the largest code.

    Attributes:
        grid: the numbers.
        marks: whether they lack NaN.
    """

    grid: FloatFormat
    marks: bool = False

    @property
    def dtype(self) -> str:
        return self.grid.name

    @property
    def signed(self) -> bool:
        return True

    @property
    def resolution(self) -> float:
        # Of integers the gap counts that lies below the largest one.
        return 2 * self.grid.max if self.marks else 2.0 ** (self.grid.mantissa_bits + 1)

    @property
    def lowest(self) -> int:
        smallest = self.grid.min_exponent - self.grid.mantissa_bits
        return self._top_exponent - smallest + 1

    @property
    def highest(self) -> int:
        return 254

    @property
    def _top_exponent(self) -> int:
        return math.frexp(self.grid.max)[1] - 1

    def scale(self, top: jax.Array) -> jax.Array:
        # The carry takes a maximum past the largest code to the next exponent.
        carry = np.uint32(0x7FFFFF) - (np.float32(self.grid.max).view(np.uint32) & np.uint32(0x7FFFFF))
        byte = (lax.bitcast_convert_type(top, jnp.uint32) + carry) >> _MANTISSA_BITS
        byte = jnp.clip(byte, self.lowest, self.highest).astype(jnp.uint8)
        return jnp.where(top < np.float32(np.inf), byte, MARKED) if self.marks else byte

    def encode(self, x: jax.Array, scale: jax.Array | None, words: jax.Array | None, positive: bool):
        y = x
        if scale is not None:
            y = x * _power_of_two(np.uint32(2 * _BIAS + self._top_exponent) - scale.astype(jnp.uint32))
        y = round_to_grid(y, self.grid, words, saturate=True)
        if positive and scale is not None:
            smallest = np.float32(2.0 ** (self.grid.min_exponent - self.grid.mantissa_bits))
            y = jnp.where(_above_zero(x) & (y == 0), smallest, y)
        if not self.marks:
            return cast_rounded(y, self.dtype)
        # The select comes last: see `cast_rounded`.
        codes = jnp.where(jnp.isnan(y), np.float32(0), y).astype(self.dtype)
        return codes if scale is None else jnp.where(scale == MARKED, np.array(0, self.dtype), codes)

    def decode(self, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        values = codes.astype(jnp.float32)
        if scale is None:
            return values
        factor = _power_of_two(scale.astype(jnp.uint32) - np.uint32(self._top_exponent))
        return values * jnp.where(scale == MARKED, np.float32(np.nan), factor)


@dataclasses.dataclass(frozen=True)
class _UnsignedCodes:
    """Floats without a sign: with a scale, or without where they have a fixed base.

    Attributes:
        numbers: the numbers.
    """

    numbers: UnsignedFloat

    @property
    def dtype(self) -> str:
        return "uint8"

    @property
    def signed(self) -> bool:
        return False

    @property
    def resolution(self) -> float:
        return 2.0 ** (self.numbers.mantissa_bits + 1)

    @property
    def marks(self) -> bool:
        return self.numbers.fixed is None

    @property
    def lowest(self) -> int:
        return 2**self.numbers.exponent_bits - 1

    @property
    def highest(self) -> int:
        return 253

    def scale(self, top: jax.Array) -> jax.Array:
        byte = lax.bitcast_convert_type(top, jnp.uint32) >> _MANTISSA_BITS
        byte = jnp.clip(byte, self.lowest, self.highest).astype(jnp.uint8)
        return jnp.where(top < np.float32(np.inf), byte, MARKED)

    def encode(self, x: jax.Array, scale: jax.Array | None, words: jax.Array | None, positive: bool):
        del positive  # they never store as zero what is not
        if scale is None:
            codes = encode_unsigned(x, words, self.numbers, self.numbers.fixed_base)
            return jnp.where(jnp.abs(x) < np.float32(np.inf), codes, NAN_CODE)
        codes = encode_unsigned(x, words, self.numbers, self.numbers.base(scale))
        return jnp.where(scale == MARKED, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            values = decode_unsigned(codes, self.numbers, self.numbers.fixed_base)
            return jnp.where(codes == NAN_CODE, np.float32(np.nan), values)
        values = decode_unsigned(codes, self.numbers, self.numbers.base(scale))
        return jnp.where(scale == MARKED, np.float32(np.nan), values)


_INT8 = FloatFormat("int8", mantissa_bits=7, min_exponent=7, max=127.0, has_infinity=False)

CODES: dict[str, Codes] = {
    "float32": _Float32Codes(),
    **{name: _FloatCodes(grid) for name, grid in FLOAT_FORMATS.items()},
    "int8": _FloatCodes(_INT8, marks=True),
    **{name: _UnsignedCodes(numbers) for name, numbers in UNSIGNED_FLOATS.items()},
}


def _power_of_two(field: jax.Array) -> jax.Array:
    """Return the power of two with the exponent field `field`, uint32."""
    return lax.bitcast_convert_type(field << _MANTISSA_BITS, jnp.float32)


def _above_zero(x: jax.Array) -> jax.Array:
    """Return whether x > 0, by its bits: XLA on CPU takes a subnormal number for zero."""
    return lax.bitcast_convert_type(x, jnp.int32) > 0
