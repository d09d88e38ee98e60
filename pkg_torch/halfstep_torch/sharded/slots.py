"""Sharded parameters in a step: the local elements, and their state."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

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
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import State


@dataclasses.dataclass(eq=False)
class PartSlot(Slot):
    """A DTensor in a step, or a part of a parameter, which may have several slots.

    It is `gathered` where a rule sees all of a parameter, or a border of a shard cuts a byte of two codes.

    Attributes:
        home: the device of state arrays, if it is another than the device of the weights.
        placed_grad: the gradient here, if it is not the parameter's own.
    """

    home: torch.device | None = None
    placed_grad: Tensor | None = None

    @property
    def has_all(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the slot is all of the parameter's local part, with its gradient there."""
        return not (self.gathered or is_elsewhere(self.owner))

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
        return self.gathered or self.waits

    @property
    def ends(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the step of the parameter ends with this slot: not if an exchange follows."""
        return not self.exchanges

    @property
    def held(self) -> Tensor:
        """The tensor with the placement of the elements; a gathered one is in all processes."""
        return self.param if self.gathered else self.owner

    @property
    def grad(self) -> Tensor:
        """The local gradient, detached."""
        if self.placed_grad is not None:
            return self.placed_grad
        assert self.owner.grad is not None
        return local_part(self.owner.grad).detach()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.param = local_part(self.owner)

    def attach(self, caller: str, state: State) -> None:
        """Read the local state of the parameter."""
        super().attach(caller, state)
        self.state = {key: local_part(x) for key, x in self.arrays.items()}

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
    return sharded_slot(param, "", plan).exchanges


def sharded_slot(param: DTensor, name: str, plan: Plan) -> PartSlot:
    """Return the slot of a DTensor, given the plan of the whole."""
    window = window_of(param)
    if how_stepped(plan, param) == "gathered":
        whole = Window.full(window.whole)
        return PartSlot(param, name, plan.within(whole), whole, plan, gathered=True)
    return PartSlot(param, name, plan.within(window), window, plan)


def new_state(param: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Return the first state of a parameter, given its plan."""
    slot = sharded_slot(param, "", plan) if is_sharded(param) else whole_slot(param, "", plan)
    return {"step": new_count(), **slot.new_arrays(plan.arrays)}


def slots_of(group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
    """Return the slots of a parameter of a group."""
    plan = group.plan(name, param)
    if not is_sharded(param):
        return [whole_slot(param, name, plan)]
    check_sharding(group.caller, name, param)
    return [sharded_slot(param, name, plan)]


def slots_in(batches: Iterable[Batch]) -> list[PartSlot]:
    """Return the slots of DTensors, in an order that all processes share."""
    slots = [slot for batch in batches for slot in batch.slots if isinstance(slot, PartSlot)]
    slots = [slot for slot in slots if is_sharded(slot.owner)]
    return sorted(slots, key=lambda slot: slot.index)
