"""The storage of a state array, which encodes float32 to codes and scales and decodes them to float32.

Contract: section F. Vectors: formats, codebook. Update rules use storage only through a `Format`, which does
not depend on them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.storage import formats as shared
from halfstep_torch.numbers.float_formats import torch_dtype
from halfstep_torch.storage.base_codes import Codes
from halfstep_torch.storage.blocks import Blocks, blocks_of
from halfstep_torch.storage.codes import CODES


class Encoded(NamedTuple):
    """A stored array, or a run of one.

    Attributes:
        codes: the codes in the array's shape or, if packed, in one row or in rows of units.
        scale: the scales, uint8 in one row, or None if the format has none.
    """

    codes: Tensor
    scale: Tensor | None


@dataclasses.dataclass(frozen=True)
class Format(shared.Format):
    """A format of float32 tensors, with its encoding and decoding.

    Attributes:
        blocks: the cut of the arrays, once `for_shape` has set their shape.
    """

    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        _ = self.codes, self.arithmetic, self.torch_dtype

    def for_shape(self, shape: tuple[int, ...]) -> "Format":
        """Return the format of an array with this shape, float32 if it is too small for a scale.

        Formats that encode and decode alike are equal, so shapes share compiled kernels.
        """
        if not self.scaled:
            return self
        if self.too_small(shape):
            return Format("float32")
        return self.replace(min_size=0, min_ndim=0, blocks=blocks_of(tuple(shape), self.block_size))

    @functools.cached_property
    def arithmetic(self) -> Codes:
        """The arithmetic of the codes."""
        return CODES[self.family][self.dtype]

    @functools.cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return torch_dtype(self.code_dtype)

    def encode(self, x: Tensor, words: Tensor | None, *, keep_nonzero: str = "never") -> Encoded:  # noqa: D102 (its base has it)
        return self.round_trip(x, words, keep_nonzero=keep_nonzero)[0]

    def round_trip(
        self, x: Tensor, words: Tensor | None, *, keep_nonzero: str = "never"
    ) -> tuple[Encoded, Tensor]:
        """Return the codes of `encode` and their values, without the cast there and back."""
        if self.blocks is None:
            wide, values = self.arithmetic.round_trip(x, words, keep_nonzero == "always")
            return Encoded(wide.to(self.torch_dtype), None), values
        y, cut_words = self.blocks.cut(x), self._words(words)
        # Infinities and NaN are left out of the maximum, or mark their block.
        magnitude = torch.where(y.abs() < math.inf, y.abs(), math.inf if self.codes.nan_in_scale else 0.0)
        block_max = magnitude.amax(self.blocks.axes(y), keepdim=True)
        scale = self.arithmetic.scale(block_max)
        nonzero: bool | Tensor = keep_nonzero == "always"
        if keep_nonzero == "where_nonnegative":
            nonzero = ~(y < 0).any(self.blocks.axes(y), keepdim=True)
        # If a maximum is past the largest scale, the scale is a mark, and codes are 0.
        wide = self.arithmetic.encode(y, scale, cut_words, nonzero)
        values = self.arithmetic.decode(self.arithmetic.to_wide(wide), scale, cut_words)
        values = self.blocks.join(values, x.shape)
        codes = self.blocks.join(wide.to(self.torch_dtype), x.shape)
        codes = self.blocks.pack(codes) if self.codes.packed else codes
        return Encoded(codes, scale.to(torch.uint8).view(-1)), values

    def decode(self, encoded: Encoded, words: Tensor | None = None) -> Tensor:  # noqa: D102 (its base has it)
        packed = self.blocks is not None and self.codes.packed
        codes = self.blocks.unpack(encoded.codes) if self.blocks and packed else encoded.codes
        # Widened before the cut, because padding does not support 8-bit floats.
        wide = self.arithmetic.to_wide(codes)
        if self.blocks is None:
            return self.arithmetic.decode(wide, None)
        assert encoded.scale is not None
        cut = self.blocks.cut(wide)
        scale = encoded.scale.to(torch.int32).view(self.blocks.firsts(cut).shape)
        values = self.arithmetic.decode(cut, scale, self._words(words))
        return self.blocks.join(values, codes.shape)

    def _words(self, words: Tensor | None) -> Tensor | None:
        """Return words in the cut of blocks, one for each block of dithered codes."""
        if words is None or self.blocks is None:
            return words
        cut = self.blocks.cut(words)
        return self.blocks.firsts(cut) if self.codes.dithered else cut

    def decoded_shape(self, codes: Tensor) -> tuple[int, ...]:
        """Return the shape of decoded codes. 4-bit codes have two elements in a byte, minus padding."""
        if self.blocks is None or not self.codes.packed:
            return tuple(codes.shape)
        return self.blocks.unpacked_shape(tuple(codes.shape))


def with_blocks(x: Any, change: Callable[[Format], Blocks | None]) -> Any:  # of the class of x
    """Return a dataclass, or a tuple of them, with other blocks in every format."""
    if isinstance(x, Format):
        return dataclasses.replace(x, blocks=change(x)) if x.blocks else x
    if isinstance(x, tuple):
        parts = [with_blocks(part, change) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return x
    fields = {field.name: with_blocks(getattr(x, field.name), change) for field in dataclasses.fields(x)}
    return dataclasses.replace(x, **fields)
