"""Where an optimizer keeps its state, and the actions of a launch for it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot
from halfstep_torch.sharded.action import Action
from halfstep_torch.sharded.cut_blocks import CutBlocks
from halfstep_torch.sharded.exchange import Gathering
from halfstep_torch.sharded.slots import slots_of


class BesideWeights:
    """State beside its weights, on their device and sharded as they are."""

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group."""
        return slots_of(group, name, param)

    def arrange(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Action]]:
        """Return batches in the order of their steps, and the actions around them."""
        return [*batches], [Gathering(batches), CutBlocks(batches)]

    def placed(self, param: Tensor, plan: Plan, state: dict[str, Any]) -> dict[str, Any]:
        """Move a new state of a parameter to where state is kept, and return it."""
        return state
