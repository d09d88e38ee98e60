"""How a state array is stored: encode float32 to codes and scales, decode them to float32.

Contract: section F. Vectors: formats, codebook, adam. A `Format` is all that an update rule knows of storage.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from halfstep_spec.storage.base_codes import NAN_SCALE, Codes
from halfstep_spec.storage.blocks import block_layout, block_maximum, pack, per_element, unpack
from halfstep_spec.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.relative_codes import FINE_CODES, FIXED_CODES


class Encoded(NamedTuple):
    """A stored array.

    Attributes:
        codes: patterns, in the array's shape; 4-bit codes are packed two per byte.
        scale: uint8, one per block; None in a format without.
        shape: of the array; None where that is the shape of the codes.
    """

    codes: np.ndarray
    scale: np.ndarray | None
    shape: tuple[int, ...] | None = None

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array, wherever it stands."""
        return self.codes.shape if self.shape is None else self.shape


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store an array of float32.

    Attributes:
        dtype: of the codes: in `PLAIN_CODES`, or with a scale in `SCALED_CODES` or `CODEBOOK_CODES`.
        scaled: whether blocks have a scale.
        block_size: elements of a block, "row" or None.
        min_size: smaller arrays are kept in float32.
        min_ndim: so are arrays of fewer axes.
        scale: "power_of_two", or "fine": of three significant bits, for integers.
        relative: whether stored values are in units of the root of a second moment, which is not known here.
    """

    dtype: str
    scaled: bool = False
    block_size: int | str | None = 128
    min_size: int = 4096
    min_ndim: int = 2
    scale: str = "power_of_two"
    relative: bool = False

    def __post_init__(self):
        if self.codes.packed and isinstance(self.block_size, int) and self.block_size % 2:
            raise ValueError(
                f"Format: block_size={self.block_size} is odd; codes of {self.dtype} are two to a byte. "
                'Use an even one, "row" or None.'
            )

    @property
    def codes(self) -> Codes:
        """The codes of the format."""
        if self.scale == "fine":
            return FINE_CODES[self.dtype]
        if self.relative and not self.scaled:
            return FIXED_CODES[self.dtype]
        return ({**SCALED_CODES, **CODEBOOK_CODES} if self.scaled else PLAIN_CODES)[self.dtype]

    def for_shape(self, shape: tuple[int, ...]) -> "Format":
        """Return the format that an array of this shape gets: float32 where it is too small for a scale."""
        small = math.prod(shape) < self.min_size or len(shape) < self.min_ndim
        return Format("float32") if self.scaled and small else self

    @property
    def power_unit(self) -> bool:
        """Whether stored values are in units of the power of two of a `uroot4_e4m4` beside it (F18)."""
        return self.relative and self.dtype == "mulaw8"

    @property
    def has_inverse_root(self) -> bool:
        """Whether encoding makes the reciprocal of the root as well (F17)."""
        return self.dtype == "uroot4_e4m4"

    def zeros(self, shape: tuple[int, ...]) -> Encoded:
        """Return the codes and scales of zeros."""
        return self.encode(np.zeros(shape, np.float32), None)

    def encode(self, x: np.ndarray, words: np.ndarray | None, *, keep_nonzero: str = "never") -> Encoded:
        """Round the float32 `x` to codes.

        Finite values saturate, infinity becomes NaN (contract R6). With a scale: y = x / 2^s, exact, s from
        the largest magnitude of the block, then y is rounded.

        Args:
            x: float32.
            words: uint32 words for stochastic rounding, or None for nearest; where codes are dithered, they
                are alike throughout a block.
            keep_nonzero: whether other numbers may not be stored as zero: "always" (a second moment),
                "never", or "where_nonnegative": in blocks without a negative number (contract S4).
        """
        if not self.scaled:
            return Encoded(self.codes.encode(x, None, words, np.zeros(x.shape, bool)), None)
        nonzero = (x > 0) & self._keeps_nonzero(x, keep_nonzero)
        scale = self.codes.scale(block_maximum(x, self.block_size))
        codes = self.codes.encode(x, self._of_elements(scale, x.shape), words, nonzero)
        if self.codes.nan_in_scale:
            bad = block_maximum((~np.isfinite(x)).astype(np.float32), self.block_size) > 0
            scale = np.where(bad, NAN_SCALE, scale).astype(np.uint8)
            codes = np.where(self._of_elements(bad, x.shape), 0, codes).astype(codes.dtype)
        if self.codes.packed:
            return Encoded(pack(codes, self.block_size), scale, x.shape)
        return Encoded(codes, scale)

    def decode(self, stored: Encoded, words: np.ndarray | None = None) -> np.ndarray:
        """Return the float32 values of codes and scales: exact.

        Args:
            stored: the result of `encode`.
            words: of `encode`, if codes are dithered; ignored otherwise.
        """
        codes, scale, shape = stored
        if scale is None:
            return self.codes.decode(codes, None, words)
        if self.codes.packed:
            assert shape is not None
            codes = unpack(codes, shape, self.block_size)
        bad = self._of_elements(scale == NAN_SCALE, codes.shape)
        values = self.codes.decode(codes, np.where(bad, 127, self._of_elements(scale, codes.shape)), words)
        return np.where(bad, np.float32(np.nan), values)

    def falls_short(self, b) -> bool:
        """Whether an average of rate `b`, stored to nearest, can stop a thousandth before its truth.

        It moves while its step is over half a gap, so that it ends half a gap over 1 - b short.
        """
        moved = np.float32(1e-3) * (np.float32(1) - np.float32(b))
        return not np.float32(self.codes.half_gap) < moved

    def freezes(self, b) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short: 1 - b is below half the relative gap.

        The gap is 2^-p for p explicit mantissa bits, 1/127 for int8 (that below its largest code), and for
        tables the largest in the top decade.
        """
        return bool(np.float32(1) - np.float32(b) < np.float32(self.codes.half_gap))

    def _keeps_nonzero(self, x: np.ndarray, keep_nonzero: str) -> np.ndarray:
        """Tell of every element whether it may not be stored as zero, if it is above zero."""
        without_negative = block_maximum((x < 0).astype(np.float32), self.block_size) == 0
        return {
            "never": np.zeros(x.shape, bool),
            "always": np.ones(x.shape, bool),
            "where_nonnegative": self._of_elements(without_negative, x.shape),
        }[keep_nonzero]

    def of_first_elements(self, words: np.ndarray) -> np.ndarray:
        """Return at every element the word of the first one in its block."""
        leading, run, block = block_layout(words.shape, self.block_size)
        return self._of_elements(words.reshape(*leading, run)[..., :: max(block, 1)], words.shape)

    def _of_elements(self, of_blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return per_element(of_blocks, shape, self.block_size)
