"""Parameters in a step, with their weights, gradients and state in this process, and their plan."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.byte_form import from_bytes
from halfstep_torch.engine.plan import Plan
from halfstep_torch.leaves.checks import LAST_STEP, check_leftovers, check_state_array
from halfstep_torch.storage.stored_moment import State


@dataclasses.dataclass(eq=False)
class Slot:
    """A whole parameter in a step. `PartSlot` is for sharded parameters.

    Attributes:
        owner: the parameter, with a gradient.
        name: the leaf name.
        plan: the plan for the elements in this process.
        window: the range of elements stepped in this process.
        whole_plan: the plan for all elements, by default the same.
        param: the weights in this process, the parameter itself or its local part.
        counter: the count in the state.
        arrays: the state arrays, as in the state.
        state: the local part of each array, row-major.
        gathered: whether a sharded parameter was gathered as a whole, into our own memory.
        index: the index of the parameter in the step, the same in all processes.
        has_all: whether the slot is the whole local part of the parameter, next to its gradient.
        exchanges: whether processes exchange words in every step of the slot.
        waits: whether a rule needs elements of the parameter in other processes.
        ends: whether the parameter's step ends with this slot.
        needs_whole: whether a step in pieces has failed.
    """

    owner: Tensor
    name: str
    plan: Plan
    window: Window
    whole_plan: Any = None  # a Plan, once the slot is made
    param: Tensor = dataclasses.field(init=False)
    counter: Tensor = dataclasses.field(init=False, repr=False)  # once state is attached
    arrays: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    gathered: bool = False
    index: int = 0
    has_all = True
    exchanges = False
    waits = False
    ends = True
    needs_whole = False

    @property
    def held(self) -> Tensor:
        """The tensor with the placement of the elements in processes."""
        return self.owner

    @property
    def step(self) -> int:
        """The count after this step, before it is incremented."""
        return min(int(self.counter) + 1, LAST_STEP)

    @property
    def grad(self) -> Tensor:
        """The local gradient, detached."""
        grad = self.owner.grad
        assert grad is not None
        return grad.detach() if grad.requires_grad else grad

    def indices(self, start: int, stop: int) -> Tensor:
        """Return the row-major indices in the parameter, int64, for a range of local elements."""
        return self.window.indices(torch.arange(start, stop, device="cpu"))

    def is_flat(self, g: Tensor) -> bool:
        """Whether weights, gradient `g` and state are in row-major order, as kernels need them."""
        arrays = (self.param, g, *self.state.values())
        return all(x.is_contiguous() for x in arrays) and g.device == self.param.device

    def __post_init__(self) -> None:
        self.whole_plan = self.whole_plan or self.plan
        self.param = self.owner

    def attach(self, caller: str, state: State) -> None:
        """Read the parameter's state. The first step makes zeros, and later steps check the arrays."""
        specs = self.whole_plan.arrays
        # A momentum that was 0 until now had no buffer.
        missing = self.new_arrays([key for key in specs if key not in state])
        state.update(missing if "step" in state else {"step": new_count(), **missing})
        check_leftovers(caller, self.name, specs, state)
        if any(_is_bytes(state[key], spec.dtype) for key, spec in specs.items()):
            # ZeroRedundancyOptimizer loads by writing entries of its state dict past `load_state_dict`.
            state.update(from_bytes(state, {key: spec.dtype for key, spec in specs.items()}))
        self.check_arrays(caller, state)
        self.arrays = {key: state[key] for key in specs}
        self.state, self.counter = self.arrays, state["step"]

    def check_arrays(self, caller: str, state: State) -> None:
        """Raise TypeError or ValueError for an array that does not fit."""
        for key, spec in self.whole_plan.arrays.items():
            check_state_array(caller, self.name, key, spec, state[key], self.owner)

    def new_arrays(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return some initial state arrays of a parameter."""
        return {key: self.plan.arrays[key].new(self.owner) for key in keys}


def _is_bytes(array: object, dtype: torch.dtype) -> bool:
    return isinstance(array, Tensor) and array.dtype == torch.uint8 != dtype


def whole_slot(param: Tensor, name: str, plan: Plan) -> Slot:
    """Return the slot of a parameter that is not sharded."""
    return Slot(param, name, plan, Window.full(tuple(param.shape)))


def new_count() -> Tensor:
    """Return the count of a parameter before its first step."""
    return torch.tensor(0, dtype=torch.int64, device="cpu")


def count_on_device(param: Tensor, state: State) -> None:
    """Move the count of a parameter to its device, where a capturable step increments it."""
    if param.device.type != "meta":
        state["step"] = state["step"].to(param.device)
