"""How a state array is stored: encode float32 to codes and scales, decode them to float32.

Contract: section F. Vectors: formats, codebook. A `Format` is all that an update rule knows of storage, and
it knows nothing of update rules.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.storage.base_codes import NAN_SCALE, Codes
from halfstep_torch.storage.blocks import Blocks, blocks_of, packed_shape, scale_shape
from halfstep_torch.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_torch.storage.fine_codes import FINE_CODES, FIXED_CODES

_WITH_SCALES = {**SCALED_CODES, **CODEBOOK_CODES}


class Encoded(NamedTuple):
    """A stored array, or a stretch of one.

    Attributes:
        codes: in the shape of the array; of 4 bits, two to a byte and in one row, or in rows of units.
        scale: uint8, one per block, in one row; None in a format without.
    """

    codes: Tensor
    scale: Tensor | None


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store an array of float32. Made by `scaled` or `codebook`, or from the name of a plain dtype.

    Attributes:
        name: of the codes: a plain state dtype, or with a scale one that `scaled` or `codebook` takes.
        scaled: whether blocks have a scale.
        block_size: elements of a block, "row" or None.
        min_size: smaller arrays are kept in float32.
        min_ndim: so are arrays of fewer axes.
        blocks: the cut of the arrays at hand, once `for_shape` has said of what shape they are.
        scale: "power_of_two", or "fine": of three significant bits.
        relative: whether what is stored is in units of the root of a second moment, which is not known here.
    """

    name: str
    scaled: bool = False
    block_size: int | str | None = None
    min_size: int = 0
    min_ndim: int = 0
    blocks: Blocks | None = None
    scale: str = "power_of_two"
    relative: bool = False

    def for_shape(self, shape: tuple[int, ...]) -> "Format":
        """Return the format that an array of this shape gets: float32 where it is too small for a scale.

        Formats that encode and decode alike are equal, so that shapes share compiled kernels.
        """
        if not self.scaled:
            return self
        if math.prod(shape) < self.min_size or len(shape) < self.min_ndim:
            return Format("float32")
        blocks = blocks_of(tuple(shape), self.block_size)
        return Format(self.name, True, self.block_size, 0, 0, blocks, self.scale, self.relative)

    @property
    def codes(self) -> Codes:
        """What the codes are."""
        if self.scale == "fine":
            return FINE_CODES[self.name]
        if self.relative:
            return FIXED_CODES[self.name]
        return (_WITH_SCALES if self.scaled else PLAIN_CODES)[self.name]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.codes.dtype

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of an array."""
        return scale_shape(tuple(shape), self.block_size)

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of an array: its own, unless they are packed."""
        return packed_shape(tuple(shape), self.block_size) if self.codes.packed else tuple(shape)

    def encode(self, x: Tensor, words: Tensor | None, *, keep_nonzero: str = "never") -> Encoded:
        """Round the float32 `x` to codes.

        Finite values saturate, infinity becomes NaN (contract R6). With a scale: y = x / 2^s, exact, s from
        the largest magnitude of the block, then y is rounded.

        Args:
            x: float32; with a scale, whole runs of the array, in row-major order.
            words: int32 words for stochastic rounding, all the same where codes are dithered, or None for
                nearest.
            keep_nonzero: whether what is not zero is not stored as zero: "always" (a second moment), "never",
                or "where_nonnegative": in blocks without a negative number (contract S4).
        """
        return self.round_trip(x, words, keep_nonzero=keep_nonzero)[0]

    def round_trip(
        self, x: Tensor, words: Tensor | None, *, keep_nonzero: str = "never"
    ) -> tuple[Encoded, Tensor]:
        """Return what `encode` gives, and what `decode` makes of that, without the cast there and back."""
        if self.blocks is None:
            wide, values = self.codes.round_trip(x, words, keep_nonzero == "always")
            return Encoded(wide.to(self.dtype), None), values
        y, cut_words = self.blocks.cut(x), None if words is None else self.blocks.cut(words)
        # What is not finite does not count for the maximum, or marks its block.
        magnitude = torch.where(y.abs() < math.inf, y.abs(), math.inf if self.codes.nan_in_scale else 0.0)
        block_max = magnitude.amax(1, keepdim=True)
        scale = self.codes.scale(block_max)
        nonzero: bool | Tensor = keep_nonzero == "always"
        if keep_nonzero == "where_nonnegative":
            nonzero = ~(y < 0).any(1, keepdim=True)
        wide = self.codes.encode(y, scale, cut_words, nonzero)
        if self.codes.nan_in_scale:
            finite = block_max < math.inf
            wide, scale = torch.where(finite, wide, 0), torch.where(finite, scale, NAN_SCALE)
        # Where a maximum is past the largest scale, the scale says so, and codes are 0.
        values = self.blocks.join(self.codes.decode(self.codes.to_wide(wide), scale, cut_words), x.shape)
        codes = self.blocks.join(wide.to(self.dtype), x.shape)
        codes = self.blocks.pack(codes) if self.codes.packed else codes
        return Encoded(codes, scale.to(torch.uint8).view(-1)), values

    def decode(self, encoded: Encoded, words: Tensor | None = None) -> Tensor:
        """Return the float32 values of codes and scales: exact.

        Args:
            encoded: what `encode` returned.
            words: with which it was made, where codes are dithered; of no use elsewhere.
        """
        packed = self.blocks is not None and self.codes.packed
        codes = self.blocks.unpack(encoded.codes) if self.blocks and packed else encoded.codes
        # Widened before it is cut: padding knows no 8-bit floats.
        wide = self.codes.to_wide(codes)
        if self.blocks is None:
            return self.codes.decode(wide, None)
        assert encoded.scale is not None
        cut_words = None if words is None else self.blocks.cut(words)
        values = self.codes.decode(self.blocks.cut(wide), encoded.scale.to(torch.int32)[:, None], cut_words)
        return self.blocks.join(values, codes.shape)

    def decoded_shape(self, codes: Tensor) -> tuple[int, ...]:
        """Return the shape of what codes decode to: two to a byte make twice as many, less ends of runs."""
        if self.blocks is None or not self.codes.packed:
            return tuple(codes.shape)
        return self.blocks.unpacked_shape(tuple(codes.shape))

    def falls_short(self, b: float) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, can end a thousandth before its mean (contract F3).

        Args:
            b: decay rate, a float32 value.

        Example:
            >>> Format("bfloat16").falls_short(0.9), Format("float32").falls_short(0.9)
            (True, False)
        """
        moved = np.float32(1e-3) * (np.float32(1) - np.float32(b))
        return not np.float32(self.codes.half_gap[0]) < moved

    def freezes(self, b: float) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short: 1 - b < half the relative gap.

        The gap is 2^-p for p explicit mantissa bits, and 1/127 for int8 (that below its largest code).
        float32 is taken as never freezing (contract F3).

        Args:
            b: decay rate, a float32 value.

        Example:
            >>> Format("bfloat16").freezes(0.999), Format("bfloat16").freezes(0.9)
            (True, False)
        """
        return bool(np.float32(1) - np.float32(b) < np.float32(self.codes.half_gap[0]))

    @property
    def rounds(self) -> bool:
        """Whether encoding rounds at all: in float32 no word is used."""
        return self.codes.half_gap[0] > 0

    @property
    def description(self) -> str | dict[str, Any]:
        """Plain types that say the same, for state dicts; `as_format` takes them back."""
        if not self.scaled and not self.relative:
            return self.name
        names = ("block_size", "min_size", "min_ndim")
        sizes = {name: getattr(self, name) for name in names}
        if self.relative:
            return {"relative": self.name, **sizes}
        key = "table" if self.name in CODEBOOK_CODES else "dtype"
        return {key: self.name, **sizes, **({"scale": "fine"} if self.scale == "fine" else {})}
