"""How an array is cut into blocks that share a scale. Contract: F4, F11. Vectors: formats, codebook.

Everything here works on row-major order, on an array or on any stretch of it that holds whole runs.
"""

import dataclasses
import math

import torch
from torch import Tensor

from halfstep.storage.blocks import BlockSize, block_layout


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The cut of arrays of one shape, in the least that tells it from another.

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
        """Elements of the shortest stretch that can be cut by itself."""
        return self.run or self.size

    @property
    def padded(self) -> int:
        """Elements of a unit once its first and its last block are made whole."""
        return -(-(self.lead + self.unit) // self.size) * self.size

    def count(self, elements: int) -> int:
        """Return the number of blocks of a stretch of whole units."""
        return elements // self.unit * (self.padded // self.size)

    def holds(self, other: "Blocks") -> bool:
        """Whether each of these blocks is whole ones of another cut, but for what is short in both.

        Example:
            >>> Blocks(128, 200).holds(Blocks(32, 200)), Blocks(128).holds(Blocks(48))
            (True, False)
        """
        return self.size % other.size == 0 and other.run in (None, self.run)

    @property
    def packed(self) -> int:
        """Bytes of a unit in codes of 4 bits."""
        return -(-self.unit // 2)

    def pack(self, codes: Tensor) -> Tensor:
        """Return 4-bit codes two to a byte, the earlier one in the low half; a unit ends with its byte.

        `codes` are whole units, in row-major order. The result has one row, or as many as `codes` if each
        holds whole units.
        """
        units = codes.reshape(-1, self.unit)
        pairs = torch.nn.functional.pad(units, (0, self.unit % 2)).view(-1, self.packed, 2)
        packed = pairs[..., 0] | (pairs[..., 1] << 4)
        return packed.reshape(_rows(codes, self.unit, self.packed))

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the codes, in one row or in as many as their bytes."""
        units = packed.reshape(-1, self.packed)
        # Not torch.stack: where runs are odd, Inductor then reads codes that are not there.
        halves = torch.tensor([0, 4], dtype=torch.uint8, device=packed.device)
        codes = ((units[:, :, None] >> halves) & 15).view(-1, 2 * self.packed)[:, : self.unit]
        return codes.reshape(_rows(packed, self.packed, self.unit))

    def unpacked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what `unpack` returns, given that of the bytes."""
        return (*shape[:-1], shape[-1] // self.packed * self.unit)

    def cut(self, x: Tensor) -> Tensor:
        """Return x in the shape (blocks, size), short blocks filled up with zeros."""
        if self.run is None:
            return x.reshape(-1, self.size)
        runs, rest = x.reshape(-1, self.run), self.padded - self.lead - self.run
        return torch.nn.functional.pad(runs, (self.lead, rest)).reshape(-1, self.size)

    def join(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """Return what `cut` was given, in its shape."""
        if self.run is None:
            return blocks.reshape(shape)
        return blocks.reshape(-1, self.padded)[:, self.lead : self.lead + self.run].reshape(shape)


def _rows(x: Tensor, unit: int, becomes: int) -> tuple[int, ...]:
    """Return the shape of an array once units have another length; one row where units cross its rows."""
    *leading, last = x.shape
    return (*leading, last // unit * becomes) if last % unit == 0 else (-1,)


def blocks_of(
    shape: tuple[int, ...], block_size: BlockSize, part: tuple[int, ...] | None = None, start: int = 0
) -> Blocks:
    """Return the cut of arrays of a shape, or of a part of one, such as a shard.

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
