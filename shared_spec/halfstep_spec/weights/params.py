"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P. Vectors: params, adam.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_spec.numbers.random_words import Role, random_words
from halfstep_spec.numbers.rounding import decode, decode_float, encode_float, round_to


def apply_updates(p: np.ndarray, u: np.ndarray, dtype: str) -> np.ndarray:
    """Return the patterns of nearest(p + u): the weight as it is stored, in every backend.

    Args:
        p: patterns of `dtype`.
        u: float32 update.
        dtype: "float32", "bfloat16" or "float16". Past the largest finite value comes infinity.
    """
    return round_to(decode(p, dtype) + u, dtype)


def landing(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the update that takes the weight p to q: q - p in float32, and -0.0 where they are equal.

    -0.0 is the one number that moves no weight, neither an infinity nor a zero of either sign.

    Args:
        p: float32 values of the weights.
        q: float32 values that the weights' dtype represents.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(q == p, np.float32(-0.0), q - p)


def round_stochastically(p: np.ndarray, u: np.ndarray, dtype: str, words: np.ndarray) -> np.ndarray:
    """Return the update that lands on p + u rounded stochastically to `dtype`.

    float32 weights: u itself. Rounds p + u to float32, then that to `dtype`.

    Args:
        p: patterns of `dtype`.
        u: float32 update.
        dtype: of the weights.
        words: uint32, one per element (role PARAM).
    """
    if dtype == "float32":
        return u
    p32 = decode(p, dtype)
    return landing(p32, decode(round_to(p32 + u, dtype, words), dtype))


def compensate(p: np.ndarray, u: np.ndarray, dtype: str, compensation: np.ndarray):
    """Return the update that lands on nearest(p + s), s = u + c, and the new compensation c.

    Kahan's sum: n = nearest(p + s), c <- nearest(s - (n - p)), in bfloat16. float32 weights: u and c.

    Args:
        p: patterns of `dtype`.
        u: float32 update.
        dtype: of the weights.
        compensation: patterns of bfloat16: what has been lost so far.

    Source: W. Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; for bfloat16 weights
    P. Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192, section 4.
    """
    if dtype == "float32":
        return u, compensation
    p32 = decode(p, dtype)
    s = u + decode(compensation, "bfloat16")
    n = decode(round_to(p32 + s, dtype), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        lost = s - (n - p32)
    return landing(p32, n), round_to(lost, "bfloat16", saturate=True)


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

    def join(self, p: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Return the float32 values of weights and extra bits; of fp16 + 16 bits, rounded to nearest float32.

        Args:
            p: patterns of `dtype`.
            extra: uint8 or uint16.
        """
        k, top = self.extra_bits, 1 << (FLOAT_FORMATS[self.dtype].bits - 1)
        sign, magnitude = p.astype(np.int64) & top, p.astype(np.int64) & (top - 1)
        magnitude = (magnitude - (extra.astype(np.int64) >> (k - 1))) << k | extra.astype(np.int64)
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
        narrow = np.uint8 if k == 8 else np.uint16
        return shown.astype(np.uint16), (magnitude & ((1 << k) - 1)).astype(narrow)


def nearest_away(w: np.ndarray, dtype: str) -> np.ndarray:
    """Return the patterns of `w` rounded to nearest, ties away from zero: how a float32 master copy is shown.

    Args:
        w: float32.
        dtype: of the weights; float32 is returned as it is.
    """
    if dtype == "float32":
        return np.asarray(w, np.float32).view(np.uint32)
    half = np.full(np.shape(w), 0x80000000, np.uint32)
    return round_to(w, dtype, half)


def param_words(seed: int, step: int, leaf: str, shape) -> np.ndarray:
    """Return the words that round a leaf's weights at `step` (1 at the first update)."""
    return random_words(seed, step, leaf, Role.PARAM, shape)
