"""Parameters in a step: which of their elements this process steps, with which plan, and where they are."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.storage.blocks import block_layout
from halfstep_torch.distributed.placement import array_placements, new_array
from halfstep_torch.distributed.shards import is_sharded, local_part, replicated, window_of, windows_of_all
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.stage import LONGEST_BLOCK
from halfstep_torch.storage.blocks import Blocks
from halfstep_torch.storage.stored_moment import StoredMoment

Layout = tuple[int, int, int]
"""Of an array in blocks the number of leading axes, the length of a run, the elements of a block."""


class Part(NamedTuple):
    """Some elements of every run of a parameter that are in this process.

    Attributes:
        start: the first of them, of those that are.
        stop: behind the last one.
        length: of those that are.
    """

    start: int
    stop: int
    length: int


@dataclasses.dataclass(eq=False)
class Slot:
    """A parameter that is stepped.

    Attributes:
        owner: the parameter, with a gradient.
        name: the leaf name.
        whole_plan: of the step of all its elements.
        window: which elements are stepped here.
        gathered: whether that is all of them, in memory of ours, though the parameter is sharded: where a
            rule sees all of a parameter, or a border of a shard cuts a byte of two codes.
        param: the weights here: the parameter itself, or what of it is in this process.
        step: the count after this step.
        counter: the count that the state holds.
        arrays: its state arrays, as the state holds them.
        state: of each what is here, row-major.
        placed_grad: the gradient here, where that is not what the parameter's own is.
        part: which elements in this process are the slot's, where borders of shards cut blocks
            (`cut_blocks.py`); None for all. The window is then in runs, an axis each.
        cuts: whether they are of blocks that have others elsewhere.
        scales: of a part the scales of its blocks, by the key of the array.
        index: of the parameter among those of the step: an order that all processes share.
    """

    owner: Tensor
    name: str
    whole_plan: Plan
    window: Window
    gathered: bool = False
    param: Any = None
    step: int = 0
    counter: Any = None
    arrays: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    placed_grad: Tensor | None = None
    part: Part | None = None
    cuts: bool = False
    scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    index: int = 0

    @functools.cached_property
    def plan(self) -> Plan:
        """That of the elements here."""
        return self.whole_plan.within(self.window, self.cuts)

    def local(self, x: Tensor) -> Tensor:
        """Return what the slot has of what this process has of the parameter, or of an array like it."""
        if self.part is None:
            return x
        runs, (start, stop, length) = self.window.shape[:-1], self.part
        if x.numel() != math.prod(runs) * length:  # codes of 4 bits
            length, start, stop = -(-length // 2), start // 2, -(-stop // 2)
        return x.reshape(*runs, length)[..., start:stop]

    def scales_in(self, key: str, x: Tensor) -> Tensor:
        """Return the scales of the slot's blocks in an array of all scales of the parameter."""
        whole, here = (_blocks(plan, key) for plan in (self.whole_plan, self.plan))
        first, count = self.window.offset[-1] // whole.size, here.count(max(self.window.shape[-1], here.unit))
        return x.view(*self.window.whole[:-1], -1)[(*self.window.box[:-1], slice(first, first + count))]

    def attach_part(self) -> None:
        """Have the part's state here, scales in memory of ours, from that of the parameter."""
        for key, array in self.arrays.items():
            x = local_part(array)
            if self.whole_plan.arrays[key].scale_of is None:
                self.state[key] = self.local(x)
                continue
            part = self.scales_in(key, x)
            for name in (key, *([f"{key}_least"] if self.cuts else [])):
                if name not in self.scales:
                    self.scales[name] = torch.zeros_like(part, memory_format=torch.contiguous_format)
            self.state[key] = self.scales[key].copy_(part)
        self.state |= self.scales

    @property
    def grad(self) -> Tensor:
        """The gradient here, detached."""
        if self.placed_grad is not None:
            return self.local(self.placed_grad)
        assert self.owner.grad is not None
        grad = local_part(self.owner.grad)
        return self.local(grad.detach() if grad.requires_grad else grad)


@dataclasses.dataclass(eq=False)
class SlotColumns:
    """What slots differ in within a launch: keys of their random words, or numbers of their counts.

    Attributes:
        columns: a row for every column, an entry per slot: int32, of `stream_keys`, or float32.
    """

    columns: Tensor

    @functools.cached_property
    def by_slot(self) -> Sequence[Tensor]:
        """Of every slot its column: to cut them all at once takes a third of the time."""
        return self.columns.split(1, dim=1)


def is_gathered(plan: Plan, param: Tensor) -> bool:
    """Whether a step needs all of a sharded parameter in every process."""
    if not is_sharded(param) or all(window.is_full for window in windows_of_all(param)):
        return False
    if any(rule.scope != "elementwise" for rule in plan.rules):
        return True
    if any(array_placements(spec, param) is None for spec in plan.arrays.values()):
        return _cut_layout(plan, param) is None
    return not all(_has_rows(plan.within(window), window) for window in windows_of_all(param))


def exchanges(plan: Plan, param: Tensor) -> bool:
    """Whether processes exchange anything in the steps of a sharded parameter."""
    return is_gathered(plan, param) or (is_sharded(param) and _cut_layout(plan, param) is not None)


def _has_rows(plan: Plan, window: Window) -> bool:
    """Whether a row of whole blocks always lies in one piece in the parameter."""
    if window.is_empty or window.is_full:
        return True
    units = (
        stage.width if stage.padded is stage else stage.blocks[0].unit
        for stage in plan.stages
        if stage.blocks
    )
    return all(window.run % unit == 0 for unit in units)


def _blocks(plan: Plan, key: str) -> Blocks:
    """Return the cut of an array of scales."""
    fmt = plan.arrays[key].scale_of
    assert fmt is not None
    assert fmt.blocks is not None
    return fmt.blocks


def slots_of(param: Tensor, name: str, plan: Plan) -> list[Slot]:
    """Return the slots of a parameter, given the plan of all of it: mostly one."""
    window = window_of(param)
    if is_gathered(plan, param):
        return [Slot(param, name, plan, Window.full(window.whole), gathered=True)]
    layout = _cut_layout(plan, param) if is_sharded(param) else None
    if layout is None:
        return [Slot(param, name, plan, window)]
    axis, run, size = layout
    leading = Window(window.whole[:axis], window.offset[:axis], window.shape[:axis])
    rest = math.prod(window.whole[axis + 1 :])
    start = window.offset[axis] * rest if window.whole[axis:] else 0
    length = math.prod(window.shape[axis:])
    slots = []
    for first, last, cuts in _parts(start, start + length, run, size) if not window.is_empty else ():
        box = (window.offset[:axis], first), (window.shape[:axis], last - first)
        offset, shape = ((*axes, number) for axes, number in box)
        part = Part(first - start, last - start, length)
        slots.append(
            Slot(param, name, plan, Window((*leading.whole, run), offset, shape), part=part, cuts=cuts)
        )
    if slots:
        return slots
    empty = Window((*leading.whole, run), (*leading.offset, 0), (*leading.shape, length))
    return [Slot(param, name, plan, empty, part=Part(0, length, length))]


def _parts(start: int, stop: int, run: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, whether it is a piece of a cut block) of a stretch of a run, cut at its blocks."""
    first = -(-start // size) * size
    last = stop if stop == run else stop // size * size
    if first > last:
        yield start, stop, True
        return
    if start < first:
        yield start, first, True
    if first < last:
        yield first, last, False
    if last < stop:
        yield last, stop, True


def _cut_layout(plan: Plan, param: Any) -> Layout | None:
    """Return how blocks lie whose scales processes tell each other; None if none do, or it is too little.

    It is enough where codes can be placed as the weights are, every process has one stretch of each run, and
    the coarsest blocks hold whole ones of the others.
    """
    scales = [spec for spec in plan.arrays.values() if spec.scale_of]
    others = [spec for spec in plan.arrays.values() if not spec.scale_of]
    formats = [spec.scale_of for spec in scales if spec.scale_of and spec.scale_of.blocks]
    moments = [moment for rule in plan.rules for moment in rule.moments]
    if (
        not any(array_placements(spec, param) is None for spec in scales)
        or any(array_placements(spec, param) is None for spec in others)
        or any(spec.shape_of for spec in scales)
        or not param.is_contiguous()
        or not all(isinstance(moment, StoredMoment) for moment in moments)
        or any(getattr(moment, "keep_nonzero", "") == "where_nonnegative" for moment in moments)
    ):
        return None
    layouts = {block_layout(tuple(param.shape), fmt.block_size)[:2] for fmt in formats}
    sizes = {fmt.blocks.size for fmt in formats if fmt.blocks}
    ((leading, run), *more), size = layouts, max(sizes)
    axis = len(leading)
    if size >= run:  # a piece is a row of its own, whatever its length
        fits = len(sizes) == 1 and not any(fmt.dithered for fmt in formats)
    else:
        odd = any(fmt.packed and fmt.blocks.size % 2 for fmt in formats if fmt.blocks)
        fits = size <= LONGEST_BLOCK and not odd and all(size % other == 0 for other in sizes)
    in_one_stretch = all(
        window.is_empty or window.shape[axis + 1 :] == window.whole[axis + 1 :]
        for window in windows_of_all(param)
    )
    return (axis, run, size) if fits and not more and in_one_stretch else None


def state_placements(plan: Plan, param: Any) -> dict[str, tuple]:
    """Return how the state arrays of a sharded parameter are placed; nothing for one that is not."""
    if not is_sharded(param):
        return {}
    if is_gathered(plan, param):
        return dict.fromkeys(plan.arrays, replicated(param))
    cut = _cut_layout(plan, param) is not None
    placements = {
        key: None if cut and spec.scale_of else array_placements(spec, param)
        for key, spec in plan.arrays.items()
    }
    return {key: replicated(param) if where is None else where for key, where in placements.items()}


def new_state(param: Tensor, plan: Plan, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the state of a parameter that was never stepped, given the plan of all of it; or some arrays."""
    arrays: Mapping = plan.arrays if keys is None else {key: plan.arrays[key] for key in keys}
    placements = state_placements(plan, param)
    made = {
        key: new_array(spec, param, placements[key]) if placements else spec.new(param)
        for key, spec in arrays.items()
    }
    if keys is not None:
        return made
    return {"step": torch.tensor(0, dtype=torch.int64, device="cpu"), **made}
