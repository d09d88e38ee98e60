"""The rows of a batch: what is stepped in its own memory, what is packed, and the length of pieces."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from halfstep_torch.engine.packed_rows import Memory, PackedRows
from halfstep_torch.engine.rows import AliasedRows, Rows, Span, kernel_dtype
from halfstep_torch.engine.slots import Slot
from halfstep_torch.engine.stage import Stage
from halfstep_torch.storage.blocks import Blocks


class RowSizes(NamedTuple):
    """How many elements are stepped in one call.

    Attributes:
        in_place: of one parameter, in its own memory.
        packed: of short parameters, copied end to end.
        short: up to which a parameter is packed.
    """

    in_place: int
    packed: int
    short: int


def row_sizes(stage: Stage, device: torch.device, compiled: bool) -> RowSizes:
    """Return the sizes that are fastest.

    On CPU packed memory fits a cache. So do the temporaries of eager mode, and those between the passes over
    a block. A short array costs less to copy than to call a kernel for.
    """
    if device.type != "cpu":
        return RowSizes(1 << 26, 1 << 22, 1 << 20) if compiled else RowSizes(1 << 24, 1 << 22, 1 << 22)
    if not compiled:
        return RowSizes(1 << 17, 1 << 17, 1 << 17)
    # torch copies one element more with all threads, and waking them takes longer than copying.
    return RowSizes(1 << 18 if stage.blocks else 1 << 24, 1 << 18, (1 << 15) - 1)


StageRows = list[tuple[list[int], list[list[Rows]]]]
"""Of slots that go through all stages together: their places, and the rows of each stage."""


def make_rows(slots: Sequence[Slot], grad_dtype: torch.dtype, compiled: bool) -> StageRows:
    """Return the rows of a batch's slots. They stay from step to step."""
    stages, device = slots[0].plan.padded_stages, slots[0].param.device
    chosen = [row_sizes(stage, device, compiled) for stage in stages]
    # Between stages stand updates in float32: those of one long parameter, or some short ones.
    together = _split(slots, chosen[0].packed) if len(stages) > 1 else [list(range(len(slots)))]
    groups: StageRows = [(places, []) for places in together]
    for k, stage in enumerate(stages):
        cuts = [_cut(k, slots, places, chosen[k], compiled) for places in together]
        counts = [sum(span.rows(stage.width) for span in pack) for cut in cuts for pack in cut.packs]
        incoming = torch.float32 if k else grad_dtype
        memory = Memory(stage, max(2, *counts) if counts else 0, device, incoming, compiled)
        for (_, stage_rows), cut in zip(groups, cuts, strict=True):
            aliased = [AliasedRows(stage, span, slots[span.slot], compiled) for span in cut.aliased]
            packed = [PackedRows(stage, pack, slots, memory) for pack in cut.packs]
            stage_rows.append([*aliased, *packed])
    return groups


def _split(slots: Sequence[Slot], length: int) -> list[list[int]]:
    """Return the indices of slots in groups: long slots each in their own group."""
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


class Cut(NamedTuple):
    """How slots reach a stage: spans that are stepped in place, and packs of spans."""

    aliased: list[Span]
    packs: list[list[Span]]


def _cut(k: int, slots: Sequence[Slot], places: Sequence[int], sizes: RowSizes, compiled: bool) -> Cut:
    """Return how slots reach the k-th stage."""
    cut, room = Cut([], []), 0
    stage = slots[0].plan.padded_stages[k]
    if stage.scope != "elementwise":
        return cut
    for place in places:
        aliased, packed = _spans(slots[place], place, k, sizes, compiled)
        cut.aliased.extend(aliased)
        for span in packed:
            length = span.rows(stage.width) * stage.width
            if length > room:
                cut.packs.append([])
                room = sizes.packed
            cut.packs[-1].append(span)
            room -= length
    return cut


def _spans(slot: Slot, place: int, k: int, sizes: RowSizes, compiled: bool) -> tuple[list[Span], list[Span]]:
    """Return the spans of a slot that are stepped in place, and those that are packed."""
    stage, n, device = slot.plan.stages[k], slot.param.numel(), slot.param.device
    short, width = None if stage.padded is stage else stage.blocks[0], stage.padded.width
    window = slot.window
    if not n:
        return [], []
    if short is None and window.run < n and window.run % width:
        short = Blocks(width, window.run)  # a row must not go on where the parameter does not
    if n < max(sizes.short + 1, 2 * width) and width <= sizes.packed:
        return [], [Span(place, window, 0, n, short=short)]
    if not (slot.param.is_contiguous() and slot.grad.is_contiguous()):
        return [], list(_boxes(slot, place, stage, sizes.packed, short))
    if short:
        length = max(sizes.packed // short.unit, 1) * short.unit
        return [], [Span(place, window, i, min(length, n - i), short=short) for i in range(0, n, length)]
    if slot.cuts:
        length = max(sizes.packed // width, 1) * width
        return [], [Span(place, window, i, min(length, n - i)) for i in range(0, n, length)]
    copied = compiled and any(kernel_dtype(x.dtype, device) != x.dtype for x in slot.state.values())
    at_once = sizes.packed if copied else sizes.in_place  # what is copied is to fit a cache
    rows, rest = divmod(n, width)
    # No piece is a single row, unless that is all of it.
    pieces = min(-(-rows * width // at_once), max(rows // 2, 1)) if rows else 0
    ends = [rows * i // pieces * width for i in range(pieces + 1)] if pieces else []
    aliased = [Span(place, window, i, j - i) for i, j in itertools.pairwise(ends)]
    return aliased, [Span(place, window, n - rest, rest)] if rest else []


def _boxes(slot: Slot, place: int, stage: Stage, length: int, short: Blocks | None) -> Iterator[Span]:
    """Yield boxes of whole runs of an array that is not row-major, of about `length` elements."""
    shape = slot.param.shape
    whole = slot.window.whole
    scale_shapes = [spec.shape(whole) for spec in stage.arrays.values() if spec.scale_of]
    axes = min((len(scale_shape) - 1 for scale_shape in scale_shapes), default=len(shape))
    rest = [math.prod(shape[axis + 1 :]) for axis in range(axes)]
    rest = [elements for elements in rest if not short or elements % short.unit == 0]
    if not rest:
        yield Span(place, slot.window, 0, slot.param.numel(), short=short)
        return
    cut = next((axis for axis, elements in enumerate(rest) if elements <= length), len(rest) - 1)
    step, start = max(length // rest[cut], 1), 0
    for fixed in itertools.product(*map(range, shape[:cut])):
        for i in range(0, shape[cut], step):
            j = min(i + step, shape[cut])
            yield Span(place, slot.window, start, (j - i) * rest[cut], (*fixed, slice(i, j)), short)
            start += (j - i) * rest[cut]
