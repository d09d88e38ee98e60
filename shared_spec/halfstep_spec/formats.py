"""How a state array is stored: encode float32 to codes, decode codes to float32.

Contract: section F. Vectors: adam. A `Format` is all that a transform knows of storage.
"""

import dataclasses

import numpy as np

from halfstep_spec.float_formats import FLOAT_FORMATS
from halfstep_spec.rounding import decode, round_to

PLAIN_STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Format:
    """A plain state dtype: codes are patterns of `dtype`, elementwise, with no scale."""

    dtype: str

    def encode(self, x: np.ndarray, words: np.ndarray | None) -> np.ndarray:
        """Round the float32 `x` to codes: finite values saturate, infinity becomes NaN (contract R6).

        Args:
            x: float32.
            words: uint32 words for stochastic rounding, or None for nearest.
        """
        return round_to(x, self.dtype, words, saturate=True)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the float32 values of `codes`: exact."""
        return decode(codes, self.dtype)

    def freezes(self, b) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short of its mean: 1 - b < 2^-(p + 1).

        p is the number of explicit mantissa bits; 2^-(p + 1) is half the largest relative gap between
        neighbours. float32 is taken as never freezing.
        """
        if self.dtype == "float32":
            return False
        gap = np.float32(2.0) ** -(FLOAT_FORMATS[self.dtype].mantissa_bits + 1)
        return bool(np.float32(1) - np.float32(b) < gap)


def as_format(dtype: str) -> Format:
    """Return the `Format` of a plain state dtype."""
    if dtype not in PLAIN_STATE_DTYPES:
        raise ValueError(f"as_format: dtype={dtype} cannot hold a state without a scale.")
    return Format(dtype)
