"""Sharded parameters in a step: the local elements, and their state."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep_torch.distributed.placement import new_array
from halfstep_torch.distributed.shards import (
    DTensor,
    check_sharding,
    is_sharded,
    local_part,
    window_of,
    windows_of_all,
)
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot, new_count, whole_slot
from halfstep_torch.leaves.checks import check_state_array
from halfstep_torch.sharded.how_stepped import how_stepped, state_placements
from halfstep_torch.storage.blocks import Blocks
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import State, min_scale_key


class Part(NamedTuple):
    """Some local elements of every run of a parameter.

    Attributes:
        start: the first of them, of those that are.
        stop: behind the last one.
        length: of those that are.
    """

    start: int
    stop: int
    length: int


@dataclasses.dataclass(eq=False)
class PartSlot(Slot):
    """A DTensor in a step, or a part of a parameter, which may have several slots.

    It is `gathered` where a rule sees all of a parameter, or a border of a shard cuts a byte of two codes.

    Attributes:
        part: which elements in this process are the slot's, where borders of shards cut blocks
            (`cut_blocks.py`); None for all. The window is then in runs, an axis each.
        rows: which rows of the first axis in this process are the slot's; None for all.
        home: where state arrays are kept, if that is another device than that of the weights.
        placed_grad: the gradient here, where that is not what the parameter's own is.
        scales: of a part the scales of its blocks, by the key of the array.
    """

    part: Part | None = None
    rows: slice | None = None
    home: torch.device | None = None
    placed_grad: Tensor | None = None
    scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def local(self, x: Tensor) -> Tensor:
        """Return the slot's view of a local array."""
        if self.rows is not None:
            return x[self.rows]
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

    @property
    def has_all(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the slot is all of the parameter's local part, with its gradient there."""
        return not (self.part or self.rows or self.gathered or is_elsewhere(self.owner))

    @functools.cached_property
    def waits(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a rule reads from other processes: norms, or the whole update."""
        if not is_sharded(self.owner) or self.gathered:
            return False
        whole = all(window.is_full for window in windows_of_all(self.owner))
        return not whole and any(rule.scope != "elementwise" for rule in self.plan.rules)

    @property
    def exchanges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether processes exchange anything in every step of the slot."""
        return self.gathered or self.part is not None or self.waits

    @property
    def ends(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the step of the parameter ends with this slot: not if an exchange follows."""
        last = self.rows is None or self.rows.stop == local_part(self.owner).shape[0]
        return last and not self.exchanges

    @property
    def held(self) -> Tensor:
        """The tensor whose placement decides which processes hold the elements; a gathered one is on all."""
        return self.param if self.gathered else self.owner

    @property
    def grad(self) -> Tensor:
        """The local gradient, detached."""
        if self.placed_grad is not None:
            return self.local(self.placed_grad)
        assert self.owner.grad is not None
        return self.local(local_part(self.owner.grad).detach())

    def __post_init__(self) -> None:
        super().__post_init__()
        here = local_part(self.owner)
        self.param = self.local(here.detach() if self.rows else here)

    def attach(self, caller: str, state: State) -> None:
        """Read the local state of the parameter; a part of a cut block gets scratch scales."""
        super().attach(caller, state)
        here = {key: local_part(array) for key, array in self.arrays.items()}
        self.kept = {
            key: self.local(x) if self.part is None else self._of_part(key, x) for key, x in here.items()
        }
        self.state = self.kept = {**self.kept, **self.scales}

    def _of_part(self, key: str, x: Tensor) -> Tensor:
        if self.whole_plan.arrays[key].scale_of is None:
            return self.local(x)
        scales = self.scales_in(key, x)
        for name in (key, min_scale_key(key)) if self.cuts else (key,):
            if name not in self.scales:
                self.scales[name] = torch.zeros_like(scales, memory_format=torch.contiguous_format)
        return self.scales[key].copy_(scales)

    def check_arrays(self, caller: str, state: State) -> None:
        """Raise TypeError or ValueError for an array that does not fit, or lies elsewhere."""
        placements = state_placements(self.whole_plan, self.owner)
        for key, spec in self.whole_plan.arrays.items():
            where = placements.get(key), self.home
            check_state_array(caller, self.name, key, spec, state[key], self.owner, *where)

    def new_arrays(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return some of the state arrays of a parameter that was never stepped: DTensors, as it is one."""
        return {key: self._at_home(self._new(self.whole_plan.arrays[key], key)) for key in keys}

    def _new(self, spec: StateArray, key: str) -> Tensor:
        if is_sharded(self.owner):
            return new_array(spec, self.owner, state_placements(self.whole_plan, self.owner)[key])
        like, home = self.owner.detach(), self.home
        if home is None:
            return spec.new(like)
        copies = spec.copies_weights or spec.copied_as
        return spec.new(like.to(home) if copies else torch.empty(like.shape, device=home))

    def _at_home(self, x: Tensor) -> Tensor:
        return x if self.home is None else kept_at(x, self.home, self.owner.device)


def kept_at(x: Tensor, home: torch.device, device: torch.device) -> Tensor:
    """Return a tensor on the host, in pinned memory if the weights are on another device."""
    x = x.to(home)  # a DTensor keeps its mesh and its placements
    if device.type == "cuda" and home.type == "cpu":
        local = local_part(x)
        local.data = local.pin_memory()
    return x


def is_elsewhere(param: Tensor) -> bool:
    """Whether the gradient of a DTensor has other placements."""
    grad = param.grad
    return is_sharded(param) and is_sharded(grad) and tuple(param.placements) != tuple(grad.placements)


def exchanges(plan: Plan, param: DTensor) -> bool:
    """Whether processes exchange anything in the steps of a sharded parameter."""
    return any(slot.exchanges for slot in sharded_slots(param, "", plan))


def _blocks(plan: Plan, key: str) -> Blocks:
    """Return the cut of an array of scales."""
    fmt = plan.arrays[key].scale_of
    assert fmt is not None
    assert fmt.blocks is not None
    return fmt.blocks


def sharded_slots(param: DTensor, name: str, plan: Plan) -> list[PartSlot]:
    """Return the slots of a DTensor, mostly one, given the plan of the whole."""

    def slot(
        window: Window, cuts: bool = False, gathered: bool = False, part: Part | None = None
    ) -> PartSlot:
        here = plan.within(window, cuts)
        return PartSlot(param, name, here, window, plan, cuts=cuts, gathered=gathered, part=part)

    window, way = window_of(param), how_stepped(plan, param)
    if way == "gathered":
        return [slot(Window.full(window.whole), gathered=True)]
    if way == "here":
        return [slot(window)]
    axis, run, size = way
    leading = Window(window.whole[:axis], window.offset[:axis], window.shape[:axis])
    rest = math.prod(window.whole[axis + 1 :])
    start = window.offset[axis] * rest if window.whole[axis:] else 0
    length = math.prod(window.shape[axis:])
    slots = []
    for first, last, cuts in _parts(start, start + length, run, size) if not window.is_empty else ():
        box = (window.offset[:axis], first), (window.shape[:axis], last - first)
        offset, shape = ((*axes, number) for axes, number in box)
        part = Part(first - start, last - start, length)
        slots.append(slot(Window((*leading.whole, run), offset, shape), cuts, part=part))
    if slots:
        return slots
    empty = Window((*leading.whole, run), (*leading.offset, 0), (*leading.shape, length))
    return [slot(empty, part=Part(0, length, length))]


def _parts(start: int, stop: int, run: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, whether it belongs to a cut block) for the parts of a run, cut at its blocks."""
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


def new_state(param: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Return the first state of a parameter, given its plan."""
    slot = sharded_slots(param, "", plan)[0] if is_sharded(param) else whole_slot(param, "", plan)
    return {"step": new_count(), **slot.new_arrays(plan.arrays)}


def slots_of(group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
    """Return the slots of a parameter of a group."""
    plan = group.plan(name, param)
    if not is_sharded(param):
        return [whole_slot(param, name, plan)]
    check_sharding(group.caller, name, param)
    return sharded_slots(param, name, plan)


def slots_in(batches: Iterable[Batch]) -> list[PartSlot]:
    """Return the slots of DTensors, in an order that all processes share."""
    slots = [slot for batch in batches for slot in batch.slots if isinstance(slot, PartSlot)]
    slots = [slot for slot in slots if is_sharded(slot.owner)]
    return sorted(slots, key=lambda slot: slot.index)
