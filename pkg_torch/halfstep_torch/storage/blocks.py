"""The cut of an array into blocks that share a scale. Contract: F4, F11. Vectors: formats, codebook.

All functions use row-major order, on an array or on any range of whole runs.
"""

import dataclasses
import math

import torch
from torch import Tensor

from halfstep.storage.blocks import BlockSize, block_layout


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The cut of arrays with one shape into blocks.

    Attributes:
        size: the number of elements in a block.
        run: the number of elements in a run with a short last block, or None if every block is whole.
    """

    size: int
    run: int | None = None

    @property
    def unit(self) -> int:
        """The number of elements in the shortest run that can be cut by itself."""
        return self.run or self.size

    @property
    def padded(self) -> int:
        """The number of elements in a unit with its last block padded."""
        return -(-self.unit // self.size) * self.size

    def count(self, elements: int) -> int:
        """Return the number of blocks in a run of whole units."""
        return elements // self.unit * (self.padded // self.size)

    def holds(self, other: "Blocks") -> bool:
        """Whether each block consists of whole blocks of another cut, apart from short blocks.

        Example:
            >>> Blocks(128, 200).holds(Blocks(32, 200)), Blocks(128).holds(Blocks(48))
            (True, False)
        """
        return self.size % other.size == 0 and other.run in (None, self.run)

    @property
    def packed(self) -> int:
        """The number of bytes in a unit of 4-bit codes."""
        return -(-self.unit // 2)

    def pack(self, codes: Tensor) -> Tensor:
        """Return 4-bit codes, two in a byte with the first in the low half. Each unit starts a new byte.

        `codes` are whole units, in row-major order. The result has the rows of `codes` if each row has whole
        bytes, or else one row.
        """
        units = codes.reshape(-1, self.unit)
        low, high = units[:, ::2], units[:, 1::2]
        if self.unit % 2:
            high = torch.nn.functional.pad(high, (0, 1))
        packed = low | (high << 4)
        return packed.reshape(_rows(codes, self.unit, self.packed))

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the unpacked codes, in one row or in the rows of their bytes."""
        units = packed.reshape(-1, self.packed)
        codes = torch.stack([units & 15, units >> 4], -1).view(-1, 2 * self.packed)[:, : self.unit]
        return codes.reshape(_rows(packed, self.packed, self.unit))

    def unpacked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result of `unpack`, given the shape of the bytes."""
        return (*shape[:-1], shape[-1] // self.packed * self.unit)

    def cut(self, x: Tensor) -> Tensor:
        """Return x in the shape (blocks, size), short blocks padded with zeros.

        If the last axis of x is a block, or the last two axes are, x is returned unchanged.
        """
        if self.run is None:
            return x if self.axes(x) else x.reshape(-1, self.size)
        runs = x.reshape(-1, self.run)
        return torch.nn.functional.pad(runs, (0, self.padded - self.run)).reshape(-1, self.size)

    def axes(self, x: Tensor) -> tuple[int, ...]:
        """Return the axes of a block in x, the last, the last two, or none if x is not cut."""
        if x.dim() > 1 and x.shape[-1] == self.size:
            return (-1,)
        return (-2, -1) if x.dim() > 2 and x.shape[-2] * x.shape[-1] == self.size else ()

    def firsts(self, cut: Tensor) -> Tensor:
        """Return the first element of each block of a cut array, with the same number of axes."""
        for axis in self.axes(cut):
            cut = cut.narrow(axis, 0, 1)
        return cut

    def join(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """Undo `cut`."""
        if self.run is None:
            return blocks.reshape(shape)
        return blocks.reshape(-1, self.padded)[:, : self.run].reshape(shape)


def _rows(x: Tensor, unit: int, becomes: int) -> tuple[int, ...]:
    """Return the shape of an array with units of another length, or one row if half bytes end its rows."""
    *leading, last = x.shape
    return (*leading, last * becomes // unit) if last * becomes % unit == 0 else (-1,)


def blocks_of(shape: tuple[int, ...], block_size: BlockSize, part: tuple[int, ...] | None = None) -> Blocks:
    """Return the cut of arrays of a shape, or of a part such as a shard.

    If a run is one block, the part's share of it is a block. Equal cuts are equal for all shapes.
    """
    leading, run, size = block_layout(shape, block_size)
    size = max(1, min(size, run))
    if part is None:
        return Blocks(size, run if run % size else None)
    here = math.prod(part[len(leading) :])
    if size >= run:
        return Blocks(here or size)
    return Blocks(size, here if here % size else None)
