"""Parameters in a step: which of their elements this process steps, with which plan, and where they are."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.placement import array_placements, new_array
from halfstep_torch.distributed.shards import is_sharded, local_part, replicated, window_of, windows_of_all
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.plan import Plan


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

    @classmethod
    def of(cls, param: Tensor, name: str, plan: Plan) -> "Slot":
        """Return the slot of a parameter, given the plan of all of it."""
        gathered, window = is_gathered(plan, param), window_of(param)
        if gathered:
            return cls(param, name, plan, Window.full(window.whole), gathered=True)
        return cls(param, name, plan, window)

    @functools.cached_property
    def plan(self) -> Plan:
        """That of the elements here."""
        return self.whole_plan.within(self.window)

    @property
    def grad(self) -> Tensor:
        """The gradient here, detached."""
        if self.placed_grad is not None:
            return self.placed_grad
        assert self.owner.grad is not None
        grad = local_part(self.owner.grad)
        return grad.detach() if grad.requires_grad else grad


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
        return True
    return not all(_has_rows(plan.within(window), window) for window in windows_of_all(param))


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


def state_placements(plan: Plan, param: Any) -> dict[str, tuple]:
    """Return how the state arrays of a sharded parameter are placed; nothing for one that is not."""
    if not is_sharded(param):
        return {}
    if is_gathered(plan, param):
        return dict.fromkeys(plan.arrays, replicated(param))
    placements = {key: array_placements(spec, param) for key, spec in plan.arrays.items()}
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
