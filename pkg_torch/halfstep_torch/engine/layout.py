"""The rows of a batch: what is stepped in its own memory, what is packed, and in pieces of which length."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from halfstep_torch.engine.packed_rows import Memory, PackedRows
from halfstep_torch.engine.rows import AliasedRows, Rows, Slot, Span, kernel_dtype
from halfstep_torch.engine.stage import Stage
from halfstep_torch.storage.blocks import Blocks

# Elements up to which an array is sooner copied to packed memory and back than given to a kernel of its own.
# On a CPU torch copies one element more with all threads, and waking them takes longer than copying.
_SHORT, _SHORT_ELSEWHERE = (1 << 15) - 1, 1 << 20


class Cut(NamedTuple):
    """How some slots are brought to a stage.

    Attributes:
        aliased: spans that are stepped in their own memory, by a call each.
        packs: spans that are packed, pack by pack.
    """

    aliased: list[Span]
    packs: list[list[Span]]


class Layout:
    """The rows of the slots of a batch. What it is made of stays from step to step, so it is made once.

    Attributes:
        groups: of slots that go through all stages together: their places, and the rows of each stage.
        signature: of the memory that the rows are of.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        signature: list[tuple],
        grad_dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        self.signature = signature
        stages = slots[0].plan.whole
        places = [list(range(len(slots)))]
        if len(stages) > 1:
            # Between the stages stand updates in float32: those of one long parameter, or some short ones.
            places = _split(slots, lengths(stages[0], slots[0].param.device, compiled)[1])
        cuts = [[_cut(k, slots, group, compiled) for k in range(len(stages))] for group in places]
        self.groups = []
        memories = [
            _memory(
                k,
                slots,
                [of_group[k].packs for of_group in cuts],
                torch.float32 if k else grad_dtype,
                compiled,
            )
            for k in range(len(stages))
        ]
        for group, of_group in zip(places, cuts, strict=True):
            rows = [
                _rows(stage, slots, cut, memory, compiled)
                for stage, cut, memory in zip(stages, of_group, memories, strict=True)
            ]
            self.groups.append((group, rows))


def signature(slots: Sequence[Slot]) -> list[tuple]:
    """Return what the rows of slots depend on, besides their plans: where they are in memory, and how."""
    kept = []
    for slot in slots:
        param, grad = slot.param, slot.param.grad
        assert grad is not None
        arrays = [array.data_ptr() for array in slot.state.values()]
        kept.append((param.data_ptr(), param.shape, param.stride(), grad.is_contiguous(), arrays))
    return kept


def _split(slots: Sequence[Slot], length: int) -> list[list[int]]:
    """Return the places of slots in groups: the long ones alone."""
    groups: list[list[int]] = []
    room = 0
    for place, slot in enumerate(slots):
        n = slot.param.numel()
        if not groups or n > room:
            groups.append([])
            room = length
        groups[-1].append(place)
        room -= n
    return groups


def lengths(stage: Stage, device: torch.device, compiled: bool) -> tuple[int, int]:
    """Return how many elements are stepped at once in their own memory, and in packed memory.

    On CPU packed memory fits a cache. So do the temporaries of eager mode, and those between the passes over
    a block. A short array costs less to copy than to call a kernel for.
    """
    if device.type != "cpu":
        return (1 << 26, 1 << 22) if compiled else (1 << 24, 1 << 22)
    if not compiled:
        return 1 << 17, 1 << 17
    return 1 << 18 if stage.blocks else 1 << 24, 1 << 18


def _cut(k: int, slots: Sequence[Slot], places: Sequence[int], compiled: bool) -> Cut:
    """Return how slots are brought to the k-th stage."""
    aliased, packed = [], []
    stage = slots[0].plan.whole[k]
    if stage.scope != "elementwise":
        return Cut([], [])
    for place in places:
        of_slot = _spans_of(slots[place], place, k, compiled)
        aliased += of_slot[0]
        packed += of_slot[1]
    packs, room = [], 0
    for span in packed:
        rows = span.rows(stage.width)
        if rows * stage.width > room:
            packs.append([])
            room = lengths(stage, slots[0].param.device, compiled)[1]
        packs[-1].append(span)
        room -= rows * stage.width
    return Cut(aliased, packs)


def _spans_of(slot: Slot, place: int, k: int, compiled: bool) -> tuple[list[Span], list[Span]]:
    stage, own, n = slot.plan.whole[k], slot.plan.stages[k], slot.param.numel()
    device, short = slot.param.device, None if own.whole is own else own.blocks[0]
    at_once, packed = lengths(stage, device, compiled)
    if not n:
        return [], []
    short_length = packed if not compiled else _SHORT if device.type == "cpu" else _SHORT_ELSEWHERE
    if n < max(short_length + 1, 2 * stage.width) and stage.width <= packed:
        return [], [Span(place, 0, n, short=short)]
    if not (slot.param.is_contiguous() and slot.grad.is_contiguous()):
        return [], list(_boxes(slot, place, own, packed, short))
    if short:
        length = max(packed // short.unit, 1) * short.unit
        return [], [Span(place, i, min(length, n - i), short=short) for i in range(0, n, length)]
    if compiled and any(kernel_dtype(x.dtype, device) != x.dtype for x in slot.state.values()):
        at_once = packed  # what is copied is to fit a cache
    rows, rest = divmod(n, stage.width)
    # No piece is a single row, unless that is all of it.
    pieces = min(-(-rows * stage.width // at_once), max(rows // 2, 1)) if rows else 0
    ends = [rows * i // pieces * stage.width for i in range(pieces + 1)] if pieces else []
    aliased = [Span(place, i, j - i) for i, j in itertools.pairwise(ends)]
    return aliased, [Span(place, n - rest, rest)] if rest else []


def _boxes(slot: Slot, place: int, stage: Stage, length: int, short: Blocks | None) -> Iterator[Span]:
    """Yield boxes of about so many elements of an array that is not row-major: whole runs."""
    shape = slot.param.shape
    scales = [spec.shape(shape) for spec in stage.arrays.values() if spec.scale_of]
    axes = min((len(of_array) - 1 for of_array in scales), default=len(shape))
    rest = [math.prod(shape[axis + 1 :]) for axis in range(axes)]
    if not rest:
        yield Span(place, 0, slot.param.numel(), short=short)
        return
    cut = next((axis for axis in range(axes) if rest[axis] <= length), axes - 1)
    step, start = max(length // rest[cut], 1), 0
    for fixed in itertools.product(*map(range, shape[:cut])):
        for i in range(0, shape[cut], step):
            j = min(i + step, shape[cut])
            yield Span(place, start, (j - i) * rest[cut], (*fixed, slice(i, j)), short)
            start += (j - i) * rest[cut]


def _memory(
    k: int,
    slots: Sequence[Slot],
    packs: Sequence[Sequence[Sequence[Span]]],
    dtype: torch.dtype,
    compiled: bool,
) -> Memory:
    """Return memory for the largest pack of the k-th stage."""
    stage = slots[0].plan.whole[k]
    counts = [sum(span.rows(stage.width) for span in pack) for of_group in packs for pack in of_group]
    rows = max(2, *counts) if counts else 0
    return Memory(stage, rows, slots[0].param.device, dtype, compiled)


def _rows(stage: Stage, slots: Sequence[Slot], cut: Cut, memory: Memory, compiled: bool) -> list[Rows]:
    """Return the rows of a stage of a group."""
    return [
        *(AliasedRows(stage, span, slots[span.slot], compiled) for span in cut.aliased),
        *(PackedRows(stage, pack, slots, memory) for pack in cut.packs),
    ]
