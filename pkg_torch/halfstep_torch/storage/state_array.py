"""A state array of a parameter, and the random words that round it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep_torch.storage.formats import Format

Shape = tuple[int, ...]


class WordSource(NamedTuple):
    """Random words of a rule, one for each element of the rounded array.

    Attributes:
        role: the role of the words.
        seed: the index of the seed, if the rule has several.
        prefix: the prefix of the name for the words, before the parameter's name.
        before: whether they belong to the step before.
        mixed: whether they are mixed. Words that dither a block are not mixed (contract F15).
    """

    role: int
    seed: int = 0
    prefix: str = ""
    before: bool = False
    mixed: bool = True


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One array of a parameter's state.

    Attributes:
        dtype: the dtype of the array.
        scale_of: the format of the scales in it, a byte per block, or None for an entry per element.
        codes_of: the format of the codes in it, or None for numbers.
        copies_weights: whether it starts as the weights. Otherwise it starts as zeros, or scales of zeros.
        copied_as: the format of the weights, rounded to nearest, with which it or its scales start.
        shape_of: a function from the parameter's shape to the stored shape, or None if they are the same.
    """

    dtype: torch.dtype
    scale_of: Format | None = None
    codes_of: Format | None = None
    copies_weights: bool = False
    copied_as: Format | None = None
    shape_of: Callable[[Shape], Shape] | None = None

    @property
    def packed_of(self) -> Format | None:
        """The format of its codes if they are two in a byte, else None."""
        return self.codes_of if self.codes_of and self.codes_of.packed else None

    def values_shape(self, shape: Shape) -> Shape:
        """Return the shape of the stored values, given the parameter's."""
        return tuple(self.shape_of(tuple(shape)) if self.shape_of else shape)

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of the array, given the parameter's."""
        shape = self.values_shape(shape)
        if self.packed_of:
            return self.packed_of.code_shape(shape)
        return self.scale_of.scale_shape(shape) if self.scale_of else shape

    def size(self, elements: int) -> int:
        """Return the number of its entries in a run of whole blocks."""
        if self.packed_of and self.packed_of.blocks:
            return elements // self.packed_of.blocks.unit * self.packed_of.blocks.packed
        return self.scale_of.blocks.count(elements) if self.scale_of and self.scale_of.blocks else elements

    def new(self, param: Tensor) -> Tensor:
        """Return the array before the first step, row-major for any layout of the parameter."""
        if self.copied_as is not None:
            encoded = self.copied_as.for_shape(tuple(param.shape)).encode(param.detach().contiguous(), None)
            start = encoded.codes if self.scale_of is None else encoded.scale
            assert start is not None
            return start.view(self.shape(param.shape)).clone()
        if self.copies_weights:
            return param.detach().to(self.dtype, memory_format=torch.contiguous_format, copy=True)
        return torch.full(self.shape(param.shape), self.start, dtype=self.dtype, device=param.device)

    @property
    def start(self) -> int:
        """The first value of every entry, 0 or the scale of zeros. Copies start as the weights."""
        return self.scale_of.codes.scale_range[0] if self.scale_of else 0
