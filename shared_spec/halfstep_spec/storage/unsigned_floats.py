"""Unsigned 8-bit floats for second moments: no sign, no subnormal numbers, zero for zero alone.

Contract: F6. Vectors: formats. Code 0 is zero; code c > 0 is float32's own pattern, cut to m mantissa
bits and counted from `base`: (c + base) << (23 - m).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class UnsignedFloat:
    """A format of `exponent_bits` + `mantissa_bits` = 8.

    Attributes:
        name: "ufloat8_e5m3" and the like.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        max_code: the largest number; 254 where 255 stands for NaN.
        fixed: float32 exponent field of code 1's binade, in a format without a scale; None in one with.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_code: int = 255
    fixed: int | None = None

    def base(self, byte: np.ndarray | int):
        """Return the base whose top but one binade is that of float32 exponent field `byte`."""
        lowest = byte - (2**self.exponent_bits - 2)
        return lowest << self.mantissa_bits

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
        UnsignedFloat("ufloat8_e6m2", 6, 2, max_code=254, fixed=77),  # 2^-50 and up
    )
}
NAN_CODE = 255
"""NaN in a format without a scale."""


def encode_unsigned(x: np.ndarray, words: np.ndarray | None, fmt: UnsignedFloat, base) -> np.ndarray:
    """Round non-negative float32 `x` to codes: add the word or one half, cut the pattern, clamp.

    Args:
        x: float32, not negative; what is not finite is the caller's business.
        words: uint32, or None for nearest, ties to even.
        fmt: the format.
        base: of every element, or one for all.
    """
    drop = 23 - fmt.mantissa_bits
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    if words is None:
        add = (1 << (drop - 1)) - 1 + (bits >> drop & 1)
    else:
        add = np.asarray(words, np.uint32).astype(np.int64) >> (32 - drop)
    codes = np.clip((bits + add >> drop) - base, 1, fmt.max_code)
    return np.where(x == 0, 0, codes).astype(np.uint8)


def decode_unsigned(codes: np.ndarray, fmt: UnsignedFloat, base) -> np.ndarray:
    """Return the float32 value of every code: exact."""
    bits = (codes.astype(np.int64) + base) << (23 - fmt.mantissa_bits)
    return np.where(codes == 0, 0, bits).astype(np.uint32).view(np.float32)
