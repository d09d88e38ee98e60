"""Parameters on their way through one step, with their state arrays and the keys of their words."""

import dataclasses
import functools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.bound_rule import flat
from halfstep_torch.engine.leaves import check_state_array
from halfstep_torch.engine.step import Plan, stream_keys
from halfstep_torch.storage.state_array import StateArray


@dataclasses.dataclass
class Slot:
    """A parameter on its way through one step.

    Attributes:
        param: the weights, with a gradient.
        name: the leaf name.
        step: the count after this step.
        state: state arrays, row-major.
        keys: for the random words; uint32, as `stream_keys` gives them.
    """

    param: Tensor
    name: str
    step: int
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    keys: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.uint32))

    @property
    def grad(self) -> Tensor:
        """The gradient, detached."""
        assert self.param.grad is not None
        return self.param.grad.detach()


@dataclasses.dataclass
class Batch:
    """Leaves that share a plan, its numbers, a device and the dtype of their gradients.

    Attributes:
        plan: of the leaves.
        numbers: of each rule, by name.
        device: of the leaves.
        grad_dtype: of their gradients.
        leaves: the parameters.
    """

    plan: Plan
    numbers: list[Any]
    device: torch.device
    grad_dtype: torch.dtype
    leaves: list[Slot] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def stage_numbers(self) -> list[list[Any]]:
        """The numbers of the rules of each stage."""
        return [[self.numbers[i] for i in stage.own] for stage in self.plan.stages]

    @functools.cached_property
    def stage_vectors(self) -> list[Tensor]:
        """The same as float32 vectors."""
        vectors = [torch.tensor(flat(numbers), dtype=torch.float32) for numbers in self.stage_numbers]
        return [vector.to(self.device) for vector in vectors]


def attach_state(caller: str, batches: Sequence[Batch], states: MutableMapping[Tensor, Any]) -> None:
    """Give leaves their state arrays: new parameters get zeros, those of others are checked.

    Args:
        caller: for messages.
        batches: of leaves.
        states: an optimizer's state, from parameter to its flat dict.
    """
    for batch in batches:
        arrays = batch.plan.arrays
        for leaf in batch.leaves:
            state = states[leaf.param]
            if not state:
                state.update(new_state(leaf.param, arrays))
            # A momentum that was 0 until now had no buffer.
            state.update({key: kept.new(leaf.param) for key, kept in arrays.items() if key not in state})
            for key, kept in arrays.items():
                check_state_array(caller, leaf.name, key, kept, state[key], leaf.param)
            leaf.state = {key: state[key] for key in arrays}


def new_state(param: Tensor, arrays: Mapping[str, StateArray]) -> dict[str, Tensor]:
    """Return the state of a parameter that was never stepped.

    Args:
        param: the weights.
        arrays: what is kept for it.
    """
    step = torch.zeros((), dtype=torch.int64)
    return {"step": step, **{key: kept.new(param) for key, kept in arrays.items()}}


def attach_keys(batches: Sequence[Batch], seeds: Sequence) -> None:
    """Give leaves the keys of their random words, those of equal streams derived at once.

    Args:
        batches: of leaves.
        seeds: of each link of the chain.
    """
    by_streams: dict[tuple, list[Slot]] = {}
    for batch in batches:
        by_streams.setdefault(batch.plan.streams(seeds), []).extend(batch.leaves)
    for streams, leaves in by_streams.items():
        rows = stream_keys(streams, [leaf.step for leaf in leaves], [leaf.name for leaf in leaves])
        for leaf, row in zip(leaves, rows, strict=True):
            leaf.keys = row
