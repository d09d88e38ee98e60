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
    """

    name: str
    exponent_bits: int
    mantissa_bits: int

    def base(self, byte: np.ndarray | int):
        """Return the base for which the top binade but one has the float32 exponent field `byte`."""
        lowest = byte - (2**self.exponent_bits - 2)
        return lowest << self.mantissa_bits


E5M3 = UnsignedFloat("ufloat8_e5m3", 5, 3)


def encode_unsigned(x: np.ndarray, words: np.ndarray | None, fmt: UnsignedFloat, base) -> np.ndarray:
    """Round non-negative float32 `x` to codes: add the word or one half, cut the pattern, clamp.

    Args:
        x: float32, not negative; the caller handles numbers that are not finite.
        words: uint32, or None for nearest, ties to even.
        fmt: the format.
        base: of every element, or one for all.
    """
    drop = 23 - fmt.mantissa_bits
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    if words is None:
        add = (1 << (drop - 1)) - 1 + (bits >> drop & 1)
    else:
        r = np.asarray(words, np.uint32).astype(np.int64) >> 16
        add = (2 * r + 1 << drop - 17) + _root_term(bits, fmt)
    codes = np.clip((bits + add >> drop) - base, 1, 255)
    return np.where(x == 0, 0, codes).astype(np.uint8)


def _root_term(bits: np.ndarray, fmt: UnsignedFloat) -> np.ndarray:
    """Return the number that rounding adds to keep the mean of x^(1/4), and not of x.

    A step divides by the root of a second moment, so E[x^(-1/2)] must be right; by Jensen's inequality that
    calls for 1/4. Let f be the fraction that is cut off, and k 3/8 of the gap, divided by the number that is
    kept. The chance of the next number is f + k f (1 - f). The reciprocal of the mantissa of the number that
    is kept, 1 / (1 + u), is taken as 0.96 - u / 2.
    """
    M, drop = fmt.mantissa_bits, 23 - fmt.mantissa_bits
    kept, cut = bits >> drop & 2**M - 1, (bits & 2**drop - 1) >> drop - 11
    return cut * (2047 - cut) * (368 - (192 >> M) * kept) >> 9 + 2 * M


def decode_unsigned(codes: np.ndarray, fmt: UnsignedFloat, base) -> np.ndarray:
    """Return the float32 value of every code: exact."""
    bits = (codes.astype(np.int64) + base) << (23 - fmt.mantissa_bits)
    return np.where(codes == 0, 0, bits).astype(np.uint32).view(np.float32)
