"""Unsigned 8-bit floats for second moments: no sign, no subnormal numbers, zero for zero alone.

Contract: F6. Code 0 is zero; code c > 0 is float32's own pattern, cut to M mantissa bits and counted from a
base: (c + base) << (23 - M). So encoding is an addition, a shift and a clamp.
"""

import dataclasses
from typing import Any

NAN_CODE = 255
"""NaN in a format without a scale, and what is past its largest number."""


@dataclasses.dataclass(frozen=True)
class UnsignedFloat:
    """A format of `exponent_bits` + `mantissa_bits` = 8.

    Attributes:
        name: "ufloat8_e5m3" and the like.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        fixed: float32 exponent field of code 1's binade, in a format without a scale; None in one with.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    fixed: int | None = None

    def base(self, byte: Any) -> Any:
        """Return the base whose top but one binade is that of float32 exponent field `byte`.

        Args:
            byte: the scale bytes, in an array of at least 16 bits.
        """
        return (byte - (2**self.exponent_bits - 2)) << self.mantissa_bits

    @property
    def fixed_base(self) -> int:
        """The base of a format without a scale."""
        assert self.fixed is not None
        return self.fixed << self.mantissa_bits


UNSIGNED_FLOATS = {
    fmt.name: fmt
    for fmt in (
        UnsignedFloat("ufloat8_e5m3", 5, 3),
        UnsignedFloat("ufloat8_e4m4", 4, 4),
        UnsignedFloat("ufloat8_e6m2", 6, 2, fixed=77),  # 2^-50 and up
    )
}
