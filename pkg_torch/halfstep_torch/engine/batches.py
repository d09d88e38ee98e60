"""Parameters that are stepped together: who shares a kernel, with their state arrays and their keys."""

import collections
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.engine.layout import Layout, signature
from halfstep_torch.engine.leaves import check_leftovers, check_state_array
from halfstep_torch.engine.plan import Plan, stream_keys
from halfstep_torch.engine.rows import Slot
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.random_words import as_int32
from halfstep_torch.rule import Rule
from halfstep_torch.storage.state_array import StateArray


@dataclasses.dataclass
class Batch:
    """Slots that go through the same stages with the same numbers, on one device.

    Attributes:
        plan: of the slots, but for short blocks.
        links: of the chain that the plan is of.
        numbers: of each rule, by name.
        slots: the parameters, with gradients of one dtype.
        keys: of their random words, int32: a row for every column of `stream_keys`, an entry per slot.
        layout: the rows of the slots.
    """

    plan: Plan
    links: Sequence[Rule] = ()
    numbers: list[Any] = dataclasses.field(default_factory=list)
    slots: list[Slot] = dataclasses.field(default_factory=list)
    keys: Any = None
    layout: Any = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages on rows."""
        return self.plan.whole

    @property
    def device(self) -> torch.device:
        """That of all slots."""
        return self.slots[0].param.device

    @property
    def grad_dtype(self) -> torch.dtype:
        """That of all gradients."""
        return self.slots[0].grad.dtype

    def stage_numbers(self, k: int) -> list[Any]:
        """Return the numbers of the rules of the k-th stage."""
        own = self.plan.bounds[k]
        return self.numbers[own.start : own.stop]


def attach_state(caller: str, batches: Sequence[Batch], states: MutableMapping[Tensor, Any]) -> None:
    """Give slots their state arrays: new parameters get zeros, those of others are checked.

    Args:
        caller: for messages.
        batches: of slots.
        states: an optimizer's state, from parameter to its flat dict.
    """
    for batch in batches:
        for slot in batch.slots:
            state = states[slot.param]
            if slot.state and _holds(state, slot.state):
                slot.counter = state["step"]
                continue  # as they were checked
            arrays = slot.plan.arrays
            if not state:
                state.update(new_state(slot.param, arrays))
            # A momentum that was 0 until now had no buffer.
            state.update({key: spec.new(slot.param) for key, spec in arrays.items() if key not in state})
            check_leftovers(caller, slot.name, arrays, state)
            for key, spec in arrays.items():
                check_state_array(caller, slot.name, key, spec, state[key], slot.param)
            slot.state, slot.counter = {key: state[key] for key in arrays}, state["step"]


def _holds(state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> bool:
    """Whether a state holds these very arrays."""
    for key, array in arrays.items():
        if state.get(key) is not array:
            return False
    return True


def new_state(param: Tensor, arrays: Mapping[str, StateArray]) -> dict[str, Tensor]:
    """Return the state of a parameter that was never stepped.

    Args:
        param: the weights.
        arrays: what is kept for it.
    """
    step = torch.zeros((), dtype=torch.int64, device="cpu")
    return {"step": step, **{key: spec.new(param) for key, spec in arrays.items()}}


def attach_keys(batches: Sequence[Batch]) -> None:
    """Give batches the keys of their random words, those of equal streams derived at once.

    Args:
        batches: of slots.
    """
    by_streams: dict[tuple, list[Batch]] = {}
    for batch in batches:
        seeds = [link.seed for link in batch.links]
        by_streams.setdefault(batch.plan.streams(seeds), []).append(batch)
    for streams, sharing in by_streams.items():
        slots = [slot for batch in sharing for slot in batch.slots]
        keys = stream_keys(streams, [slot.step for slot in slots], [slot.name for slot in slots])
        start = 0
        for batch in sharing:
            stop = start + len(batch.slots)
            columns = np.ascontiguousarray(as_int32(keys[start:stop]).T)
            batch.keys, start = torch.from_numpy(columns).to(batch.device), stop


def attach_layouts(
    batches: Mapping[tuple, Batch], compiled: Mapping[torch.device, bool], layouts: dict[tuple, Layout]
) -> None:
    """Give batches their rows: those of the step before where all is where it was.

    Args:
        batches: with state, by what tells them apart; a step last.
        compiled: on which devices steps run compiled.
        layouts: of the step before; they become those of this one.
    """
    before, places = dict(layouts), collections.Counter()
    layouts.clear()
    for (*key, _), batch in batches.items():
        # Batches that differ in their steps alone come in the order of the parameters.
        kind = (*key, compiled[batch.device])
        kind, places[kind] = (*kind, places[kind]), places[kind] + 1
        now, layout = signature(batch.slots), before.get(kind)
        if layout is None or layout.signature != now:
            layout = Layout(batch.slots, now, batch.grad_dtype, compiled[batch.device])
        layouts[kind] = batch.layout = layout
