"""The floating-point formats of 8, 16 and 32 bits: a table, no functions of data.

Names are as in ml_dtypes: a name gives the bits (e4m3: four of exponent, three of mantissa;
fn: finite, with NaN but no infinity).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format of at most 32 bits, with a sign bit on top.

    Attributes:
        name: the ml_dtypes name.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field (the explicit bits, p in the contract).
        bias: exponent bias; the smallest normal number is 2^(1 - bias).
        max_code: pattern of the largest finite magnitude.
        overflow_code: the next pattern: infinity, or NaN where the format has no infinity.
        nan_code: the quiet NaN that rounding a NaN gives.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    overflow_code: int
    nan_code: int

    @property
    def bits(self) -> int:
        """Width of a whole code, in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def code_dtype(self) -> np.dtype:
        """The narrowest unsigned integer that holds a code."""
        return np.dtype(next(f"uint{width}" for width in (8, 16, 32) if self.bits <= width))


FLOAT_FORMATS = {
    fmt.name: fmt
    for fmt in (
        FloatFormat("float32", 8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
        FloatFormat("bfloat16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7FC0),
        FloatFormat("float16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7E00),
        FloatFormat("float8_e4m3fn", 4, 3, 7, 0x7E, 0x7F, 0x7F),
        FloatFormat("float8_e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7E),
        FloatFormat("float8_e3m4", 3, 4, 3, 0x6F, 0x70, 0x78),
    )
}
