"""A weight in two parts: the model's, and further bits of its mantissa. Contract: P5. Vectors: weights."""

import dataclasses

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_spec.numbers.rounding import decode_float, encode_float, round_to


@dataclasses.dataclass(frozen=True)
class SplitWeight:
    """A weight in two parts: the model's, nearest with ties away from zero, and `extra_bits` further bits.

    Together they are a number of a wider format: that of the weight with `extra_bits` more bits of mantissa.
    With 16 more, bfloat16 becomes float32 itself. Ties go away from zero because an even weight would
    otherwise have 2^16 + 1 numbers to tell apart by 16 bits.

    Attributes:
        dtype: of the weight: "bfloat16" or "float16".
        extra_bits: 8 or 16.
    """

    dtype: str
    extra_bits: int

    @property
    def wide(self) -> FloatFormat:
        """The wider format."""
        narrow, k = FLOAT_FORMATS[self.dtype], self.extra_bits
        overflow = narrow.overflow_code << k
        return dataclasses.replace(
            narrow,
            name=f"{narrow.name}+{k}",
            mantissa_bits=narrow.mantissa_bits + k,
            max_code=overflow - 1,
            overflow_code=overflow,
            nan_code=narrow.nan_code << k,
        )

    @property
    def extra_dtype(self) -> np.dtype:
        """The dtype of the low bits."""
        return np.dtype(f"uint{self.extra_bits}")

    def join(self, p: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Return the float32 values of weights and extra bits; of fp16 + 16 bits, rounded to nearest float32.

        Args:
            p: patterns of `dtype`.
            extra: uint8 or uint16.
        """
        k, narrow = self.extra_bits, FLOAT_FORMATS[self.dtype]
        top, low = 1 << (narrow.bits - 1), extra.astype(np.int64)
        sign, magnitude = p.astype(np.int64) & top, p.astype(np.int64) & (top - 1)
        rounded_up = low >> (k - 1)
        # A zero that was rounded up, an infinity that was not: the low bits belong to another weight. In
        # bfloat16 so do all with a number below the smallest one.
        head, lowest = magnitude - rounded_up, 1 if self.dtype == "bfloat16" else 0
        other = (head < lowest) | ((head == narrow.overflow_code) & (rounded_up == 0))
        low, rounded_up = np.where(other, 0, low), np.where(other, 0, rounded_up)
        magnitude = (magnitude - rounded_up) << k | low
        return decode_float(np.where(sign == 0, magnitude, magnitude | top << k), self.wide)

    def split(self, w: np.ndarray, words: np.ndarray):
        """Return the weight's patterns and the extra bits of float32 values.

        Rounds stochastically to the wider format, then the weight to nearest.

        Args:
            w: float32.
            words: uint32, one per element (role PARAM); read only where the wider format cannot hold w.
        """
        k, top = self.extra_bits, 1 << (FLOAT_FORMATS[self.dtype].bits - 1)
        code = encode_float(w, self.wide, words, saturate=False).astype(np.int64)
        sign, magnitude = (code >> k) & top, code & ((top << k) - 1)
        shown = sign | (magnitude + (1 << (k - 1)) >> k)
        low = magnitude & ((1 << k) - 1)
        return shown.astype(FLOAT_FORMATS[self.dtype].code_dtype), low.astype(self.extra_dtype)


def nearest_away(w: np.ndarray, dtype: str) -> np.ndarray:
    """Return the patterns of `w` rounded to nearest, ties away from zero.

    Args:
        w: float32.
        dtype: of the weights.
    """
    half = np.full(np.shape(w), 0x80000000, np.uint32)
    return round_to(w, dtype, half)
