"""Rows: parameters, their gradients and their state as matrices whose rows are whole blocks.

    parameter   its elements in row-major order, whatever its layout in memory: index 0 to n - 1
    window      the elements that this process has: a box, or the whole parameter if it is not sharded
    span        a stretch of a window, or a box of its leading axes
    row         a block of a span; `_WIDTH` elements of it where no format has blocks
    keys        of each row: the index of its first element, and k0, k1, ... of its parameter
    aliased     a span that is rows in its own memory: nothing is copied
    packed      many spans end to end, in memory of ours (`packed_rows.py`): a short row is filled up, and
                the filling is not written back

                    parameter a               b           c              rows 0 to 2 of a could be aliased
                |-----|-----|-----|---  |  |-----|--   |  |---   |
                 row 0 row 1 row 2 row 3    row 4 row 5    row 6

So one array, many arrays, shards, short blocks and indices past 2^32 are one case: rows that start where they
start.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.slots import Slot, SlotColumns
from halfstep_torch.engine.stage import Stage, column
from halfstep_torch.numbers.random_words import GOLDEN_RATIO
from halfstep_torch.storage.blocks import Blocks
from halfstep_torch.storage.state_array import StateArray


@dataclasses.dataclass(frozen=True)
class Span:
    """Some whole runs of a slot, next to each other in row-major order.

    Attributes:
        slot: its place among the slots.
        window: which elements of the parameter the slot has.
        start: row-major index of the first element, in the window.
        length: in elements.
        box: an index into the leading axes of any array of the slot; None for a stretch of memory.
        short: the cut of its blocks where runs begin or end in a short one, which is to be filled up.
    """

    slot: int
    window: Window
    start: int
    length: int
    box: tuple | None = None
    short: Blocks | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the span is the whole slot, in any layout."""
        return self.box is None and self.short is None and self.length == math.prod(self.window.shape)

    def rows(self, width: int) -> int:
        """Return the number of its rows."""
        if self.short is None:
            return -(-self.length // width)
        return self.short.count(self.length)

    def firsts(self, width: int) -> Tensor:
        """Return the row-major index in the parameter of the first element of every row, int64."""
        length = width if self.short is None else self.short.unit
        runs = torch.arange(self.start, self.start + self.length, length, device="cpu")
        runs = self.window.indices(runs)
        if self.short is None:
            return runs
        blocks = torch.arange(0, self.short.padded, self.short.size, device="cpu")
        return (runs[:, None] + (blocks - self.short.lead)).view(-1)

    def of(self, x: Tensor, entries: int) -> Tensor:
        """Return the span's entries of an array of the slot."""
        if self.box is not None:
            return x[self.box]
        if x.numel() == entries:
            return x
        start = self.start * entries // self.length
        stretch = x.view(-1)[start : start + entries]
        return stretch if self.short is None else stretch.view(self.length // self.short.unit, -1)

    def within(self, rows: Tensor, x: Tensor) -> Tensor:
        """Return the view of the `rows` that holds the span's entries `x` of an array."""
        if self.short is None:
            return rows.view(-1)[: x.numel()].view(x.shape)
        runs = self.length // self.short.unit
        products = itertools.accumulate(x.shape, operator.mul, initial=1)
        leading = next(k for k, product in enumerate(products) if product == runs)
        entries = rows.view(*x.shape[:leading], -1)
        first = self.short.lead * entries.shape[-1] // self.short.padded
        entries = entries[..., first : first + x.numel() // runs]
        return entries.unflatten(-1, x.shape[leading:])


class Rows:
    """Spans as matrices of a stage's width, one for every kind of array.

    Attributes:
        stage: that steps them.
        p: weights.
        g: the incoming gradient or update.
        u: the update that the stage leaves; None where it changes the weights.
        state: state arrays in the order of the stage's; scales in one row.
        slots: of each row, the place of its slot; None where there is one span.
        low: of each row, the low half of the row-major index of its first element, int32.
        high: the high half, in a column; of each element, where a row has two; None where all are 0.
        column: 0, 1, ... up to the width.
        single_slot: whether they are rows of one slot, next to each other, whose indices have no high half.
    """

    p: Tensor
    g: Tensor
    u: Tensor | None = None
    state: list[Tensor]

    def __init__(self, stage: Stage, spans: Sequence[Span], device: torch.device, min_rows: int = 0) -> None:
        counts = torch.tensor([span.rows(stage.width) for span in spans], device="cpu")
        slots = torch.tensor([span.slot for span in spans], device="cpu").repeat_interleave(counts)
        firsts = torch.cat([span.firsts(stage.width) for span in spans])
        # Packed, a single row would be a graph of its own.
        spare = max(min_rows - len(slots), 0)
        firsts = torch.nn.functional.pad(firsts, (0, spare))
        self.stage, self.spans, self._count = stage, spans, len(firsts)
        self.column = column(stage.width, device)
        self.slots = None if len(spans) == 1 else torch.nn.functional.pad(slots, (0, spare)).to(device)
        self.low = firsts.to(torch.int32).to(device)
        self.high = _high_halves(firsts, stage.width, device)
        regular = int(firsts[0]) + stage.width * torch.arange(len(firsts), device="cpu")
        self.single_slot = self.slots is None and self.high is None and torch.equal(firsts, regular)

    def __len__(self) -> int:
        return self._count

    def entries(self, slot_columns: SlotColumns) -> Tensor:
        """Return the columns with one number for each row."""
        if self.slots is None:
            return slot_columns.by_slot[self.spans[0].slot].expand(-1, self._count).contiguous()
        return slot_columns.columns.index_select(1, self.slots)

    def keys(self, slot_keys: SlotColumns) -> Tensor:
        """Return the keys of the rows, int32: each column has a number for each row, or element past 2^32."""
        columns = self.entries(slot_keys)
        if self.high is None:
            return columns
        # Contract W8: the high half of the index is added to k1, golden ratio times.
        high = self.high * (int(GOLDEN_RATIO) - (1 << 32))
        columns = columns[:, :, None].expand(-1, *high.shape).clone()
        for _, k1_of_roles in self.stage.columns(columns.unbind()):
            for k1 in k1_of_roles.values():
                k1 += high
        return columns if high.shape[1] > 1 else columns[:, :, 0].contiguous()

    def load(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor] | None) -> None:
        """Copy into the matrices: weights, state, and each slot's gradient or incoming update.

        `outgoing` has where the update of this stage goes; None where it changes the weights.
        """
        raise NotImplementedError

    def write_back(self, outgoing: Mapping[int, Tensor] | None) -> None:
        """Copy what the stage has changed back to its slots."""
        raise NotImplementedError


def _high_halves(firsts: Tensor, width: int, device: torch.device) -> Tensor | None:
    first, last = firsts >> 32, (firsts + (width - 1)) >> 32
    if not last.any():
        return None
    # Only rows of an odd width have two.
    high = first[:, None]
    if not torch.equal(first, last):
        high = (firsts[:, None] + torch.arange(width, device="cpu")) >> 32
    return high.to(torch.int32).to(device)


class AliasedRows(Rows):
    """Rows of one slot in its own memory; only state in an unsuitable dtype or place is copied."""

    def __init__(self, stage: Stage, span: Span, slot: Slot, wide: bool) -> None:
        super().__init__(stage, [span], slot.param.device)
        self.p = self._alias(slot.param, stage.width)
        self.state = [
            self._alias(slot.state[name], spec.size(stage.width), flat=spec.scale_of is not None)
            for name, spec in stage.arrays.items()
        ]
        specs = zip(self.state, stage.arrays.values(), strict=True)
        self._narrow = {i: x for i, (x, spec) in enumerate(specs) if wide and _is_copied(x, spec)}

    def _alias(self, x: Tensor, per_row: int, flat: bool = False) -> Tensor:
        (span,), rows = self.spans, len(self)
        start = span.start // self.stage.width * per_row
        return alias(x, start, (rows * per_row,) if flat else (rows, per_row))

    def load(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor] | None) -> None:
        """Take views of the incoming and the outgoing update; weights and state are in place."""
        slot, shape = self.spans[0].slot, self.p.shape
        g = incoming[slot]
        self.g = g.as_strided(shape, self.p.stride(), g.storage_offset() + self.spans[0].start)
        self.u = None if outgoing is None else self._alias(outgoing[slot], self.stage.width)
        for i, x in self._narrow.items():
            self.state[i] = x.to(kernel_dtype(x.dtype, x.device), copy=True)

    def write_back(self, outgoing: Mapping[int, Tensor] | None) -> None:
        """Write back the state that was copied, and drop the gradient so that it can be freed."""
        for i, x in self._narrow.items():
            x.copy_(self.state[i])
            self.state[i] = x
        del self.g
        self.u = None


def _is_copied(x: Tensor, spec: StateArray) -> bool:
    """Return whether a kernel needs a copy of a state array, for its dtype or its alignment.

    On a CPU a kernel reads codes that share a byte by words of four bytes, and memory must begin with a word.
    """
    split = spec.packed_of is not None and x.device.type == "cpu" and x.storage_offset() % 4 > 0
    return split or kernel_dtype(x.dtype, x.device) != x.dtype


def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a kernel reads a state array: its own, or one that Inductor can vectorize."""
    return torch.int32 if dtype == torch.int16 and device.type == "cpu" else dtype


def alias(x: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return a view of a row-major tensor from entry `start` on, in a shape.

    It may have another `dtype` of the same size.

    Not a view: a view has a base, and Dynamo, where it is shown one, compiles once for every rank of bases.
    """
    strides = tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]
    same = torch.empty(0, dtype=x.dtype if dtype is None else dtype, device=x.device)
    return same.set_(x.untyped_storage(), x.storage_offset() + start, shape, strides)
