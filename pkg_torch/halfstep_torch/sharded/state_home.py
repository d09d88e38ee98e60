"""Where an optimizer keeps its state, and the actions of a launch for it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.counts import Counts
from halfstep_torch.engine.groups import Owner, ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot
from halfstep_torch.sharded.action import Action
from halfstep_torch.sharded.exchange import Gathering
from halfstep_torch.sharded.slots import slots_of
from halfstep_torch.storage.stored_moment import State


class BesideWeights:
    """State beside its weights, on their device and sharded as they are."""

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group."""
        return slots_of(group, name, param)

    def arrange(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Action]]:
        """Return batches in the order of their steps, and the actions around them."""
        return [*batches], [Gathering(batches)]

    def placed(self, param: Tensor, plan: Plan, state: State) -> State:
        """Move a new state of a parameter to where state is kept, and return it."""
        return state


class StateOwner(Owner, Protocol):
    """The attributes of an optimizer that a launch and a state dict read, with the home of its state."""

    state: defaultdict[Tensor, Any]  # as torch declares it: of each parameter a `State`
    _home: BesideWeights
    _counts: Counts
    _half_loaded: str | None
    _by_param: dict

    def drop_launches(self, why: str) -> None:
        """Forget built steps."""
        ...
