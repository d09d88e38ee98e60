"""The 8- and 16-bit floating-point formats as float32 sees them: a table, no functions of data.

Names are as in ml_dtypes. Contract: section R.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A floating-point format that float32 holds exactly.

    Attributes:
        name: the ml_dtypes name.
        mantissa_bits: explicit bits of the significand (p in the contract).
        min_exponent: the smallest normal number is 2^min_exponent.
        max: the largest finite value.
        has_infinity: whether infinity is past `max`; else NaN is.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    has_infinity: bool = True

    @property
    def smallest(self) -> float:
        """The smallest number above zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def first_normal(self) -> int:
        """The pattern in float32 of the smallest normal number."""
        return (127 + self.min_exponent) << 23

    @property
    def base(self) -> int:
        """The offset of float32's patterns, cut to the format's mantissa, over its own."""
        return (126 + self.min_exponent) << self.mantissa_bits

    @property
    def sign(self) -> int:
        """The bit of a sign in a pattern of 8 or 16 bits."""
        return 0x8000 if self.name.endswith("16") else 0x80

    @property
    def nan_code(self) -> int:
        """The pattern of NaN: exponent all ones, and the first bit of the mantissa, or all of them."""
        ones = self.sign - 1
        cut_off = self.mantissa_bits - 1 if self.has_infinity else 0
        return ones >> cut_off << cut_off

    def gap_exponents(self, gaps: int) -> tuple[int, int]:
        """Return (n, lowest): 2^gaps over the gap at a number is the pattern `(n - max(e, lowest)) << 23`.

        e is the exponent field of the number in float32. The result is at most 2^127.
        """
        bits = self.mantissa_bits + gaps
        return 254 + bits, max(127 + self.min_exponent, bits)

    @property
    def max_code(self) -> int:
        """The code of `max`: numbers are counted from zero up."""
        exponent = max(math.frexp(self.max)[1] - 1, self.min_exponent)
        above = (exponent - self.min_exponent) << self.mantissa_bits
        return above + int(self.max / 2.0 ** (exponent - self.mantissa_bits))


FLOAT_FORMATS = {
    fmt.name: fmt
    for fmt in (
        FloatFormat("bfloat16", 7, -126, (2 - 2**-7) * 2.0**127),
        FloatFormat("float16", 10, -14, 65504.0),
        FloatFormat("float8_e4m3fn", 3, -6, 448.0, has_infinity=False),
        FloatFormat("float8_e5m2", 2, -14, 57344.0),
        FloatFormat("float8_e3m4", 4, -2, 15.5),
    )
}
INT8 = FloatFormat("int8", mantissa_bits=7, min_exponent=7, max=127.0, has_infinity=False)
"""The integers as floats that are all subnormal, with 1 for the smallest: one rounding serves all."""
INT4 = FloatFormat("int4", mantissa_bits=3, min_exponent=3, max=7.0, has_infinity=False)
"""Likewise, in four bits."""
HALVES = FloatFormat("float8_e3m4", 4, -3, 7.75)
"""The codes of float8_e3m4, each of which stands for half as much."""
