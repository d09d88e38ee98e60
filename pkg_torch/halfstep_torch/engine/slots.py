"""Parameters in a step: their weights, gradients and state in this process, and the plan of their step."""

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
    """A parameter in a step, all of it in this process. `PartSlot` is for sharded parameters.

    Attributes:
        owner: the parameter, with a gradient.
        name: the leaf name.
        plan: of the step of the elements here.
        window: which elements are stepped here.
        whole_plan: that of the step of all elements; by default the same.
        param: the weights here: the parameter itself, or what of it is in this process.
        counter: the count that the state holds.
        arrays: its state arrays, as the state holds them.
        state: of each what is here, row-major.
        gathered: whether what is here, of a sharded parameter, is all of it, in memory of ours.
        index: of the parameter among those of the step: an order that all processes share.
        has_all: whether it is all that this process has of the parameter, whose gradient is beside it.
        exchanges: whether processes exchange anything in every step of the slot.
        waits: whether a rule sees elements of the parameter that are not here.
        ends: whether the parameter is stepped once the slot is.
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
        """The tensor whose placement decides which processes hold the elements."""
        return self.owner

    @property
    def step(self) -> int:
        """The count after this step, as long as it is not counted."""
        return min(int(self.counter) + 1, LAST_STEP)

    @property
    def grad(self) -> Tensor:
        """The local gradient, detached."""
        grad = self.owner.grad
        assert grad is not None
        return grad.detach() if grad.requires_grad else grad

    def indices(self, start: int, stop: int) -> Tensor:
        """Return the row-major indices in the parameter, int64, of a range of the elements here."""
        return self.window.indices(torch.arange(start, stop, device="cpu"))

    def is_flat(self, g: Tensor) -> bool:
        """Whether weights, gradient `g` and state are in row-major order, as kernels need them."""
        arrays = (self.param, g, *self.state.values())
        return all(x.is_contiguous() for x in arrays) and g.device == self.param.device

    def __post_init__(self) -> None:
        self.whole_plan = self.whole_plan or self.plan
        self.param = self.owner

    def attach(self, caller: str, state: State) -> None:
        """Read the parameter's state: make zeros at the first step, and check what is there at later ones."""
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
        """Return some of the state arrays of a parameter that was never stepped."""
        return {key: self.plan.arrays[key].new(self.owner) for key in keys}


def _is_bytes(array: object, dtype: torch.dtype) -> bool:
    return isinstance(array, Tensor) and array.dtype == torch.uint8 != dtype


def whole_slot(param: Tensor, name: str, plan: Plan) -> Slot:
    """Return the slot of a parameter that is not sharded."""
    return Slot(param, name, plan, Window.full(tuple(param.shape)))


def new_count() -> Tensor:
    """Return the count of a parameter that was never stepped."""
    return torch.tensor(0, dtype=torch.int64, device="cpu")


def count_on_device(param: Tensor, state: State) -> None:
    """Move the count of a parameter to its device, where a capturable step increments it."""
    if param.device.type != "meta":
        state["step"] = state["step"].to(param.device)
