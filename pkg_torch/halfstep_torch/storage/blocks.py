"""How an array is cut into blocks that share a scale. Contract: F4, F11. Vectors: formats, codebook.

Everything here works on row-major order, on an array or on any stretch of it that holds whole runs.
"""

import dataclasses
import math
import sys

import torch
from torch import Tensor

from halfstep.storage.blocks import BlockSize, block_layout


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How arrays of one shape are cut into blocks.

    Attributes:
        size: elements of a block.
        run: elements of a run, whose last block is short; None where every block is whole.
        lead: elements of the first block of a run that are elsewhere, in another shard.
    """

    size: int
    run: int | None = None
    lead: int = 0

    @property
    def unit(self) -> int:
        """The number of elements in the shortest run that can be cut by itself."""
        return self.run or self.size

    @property
    def padded(self) -> int:
        """The number of elements in a unit whose first and last block are padded."""
        return -(-(self.lead + self.unit) // self.size) * self.size

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
        """Return 4-bit codes, two to a byte, the earlier one in the low half; each unit starts a new byte.

        `codes` are whole units, in row-major order. The result has as many rows as `codes` if each holds
        whole bytes, or else one.
        """
        if self._in_words(codes, 8):
            return _pack_words(codes)
        units = codes.reshape(-1, self.unit)
        # Not pairs of a padded unit: Inductor then reads no code where the last one stands alone.
        high = torch.nn.functional.pad(units[:, 1::2], (0, self.unit % 2))
        packed = units[:, ::2] | (high << 4)
        return packed.reshape(_rows(codes, self.unit, self.packed))

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the unpacked codes, in one row or in the rows of their bytes."""
        if self._in_words(packed, 4):
            return _unpack_words(packed)
        units = packed.reshape(-1, self.packed)
        # Not torch.stack: where runs are odd, Inductor then reads codes that are not there.
        halves = torch.tensor([0, 4], dtype=torch.uint8, device=packed.device)
        codes = ((units[:, :, None] >> halves) & 15).view(-1, 2 * self.packed)[:, : self.unit]
        return codes.reshape(_rows(packed, self.packed, self.unit))

    def _in_words(self, x: Tensor, per_word: int) -> bool:
        """Return whether codes are packed eight at a time, as in a kernel that sees blocks as an axis."""
        whole = x.dim() > 2 and self.unit % 8 == 0 and x.shape[-1] % per_word == 0
        return whole and torch.compiler.is_compiling() and sys.byteorder == "little"

    def unpacked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what `unpack` returns, given that of the bytes."""
        return (*shape[:-1], shape[-1] // self.packed * self.unit)

    def cut(self, x: Tensor) -> Tensor:
        """Return x in the shape (blocks, size), short blocks padded with zeros.

        If the last axis of x is a block, or the last two axes are, x stays as it is.
        """
        if self.run is None:
            return x if self.axes(x) else x.reshape(-1, self.size)
        runs, rest = x.reshape(-1, self.run), self.padded - self.lead - self.run
        return torch.nn.functional.pad(runs, (self.lead, rest)).reshape(-1, self.size)

    def axes(self, x: Tensor) -> tuple[int, ...]:
        """Return the axes of x along which a block lies: the last, the last two, or none if x is not cut."""
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
        return blocks.reshape(-1, self.padded)[:, self.lead : self.lead + self.run].reshape(shape)


def _pack_words(codes: Tensor) -> Tensor:
    """Return 4-bit codes, two to a byte, eight at a time in 64-bit words."""
    words = codes.view(torch.int64)
    for shift, kept in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        words = (words | (words >> shift)) & kept
    return words.to(torch.int32).view(torch.uint8)


def _unpack_words(packed: Tensor) -> Tensor:
    """Return the codes that `_pack_words` was given."""
    words = packed.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    for shift, kept in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        words = (words | (words << shift)) & kept
    return words.view(torch.uint8)


def _rows(x: Tensor, unit: int, becomes: int) -> tuple[int, ...]:
    """Return the shape of an array whose units get another length; one row if half bytes end its rows."""
    *leading, last = x.shape
    return (*leading, last * becomes // unit) if last * becomes % unit == 0 else (-1,)


def blocks_of(
    shape: tuple[int, ...], block_size: BlockSize, part: tuple[int, ...] | None = None, start: int = 0
) -> Blocks:
    """Return the cut of arrays of a shape, or of a part such as a shard.

    A part may begin or end in the middle of a block: `start` is where, in every run. If a run is one block,
    what the part has of it is a block. Equal cuts are equal, whatever the shape.
    """
    leading, run, size = block_layout(shape, block_size)
    size = max(1, min(size, run))
    if part is None:
        return Blocks(size, run if run % size else None)
    here = math.prod(part[len(leading) :])
    if size >= run:
        return Blocks(here or size)
    return Blocks(size, here if here % size or start % size else None, start % size)
