"""Where an optimizer keeps state, and what a launch does around its batches for that."""

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
    """State is where its weights are, and sharded as they are."""

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group."""
        return slots_of(group, name, param)

    def arrange(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Action]]:
        """Return batches in the order of their steps, and what is done around these."""
        return [*batches], [Gathering(batches), CutBlocks(batches)]

    def placed(self, param: Tensor, plan: Plan, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, made beside it, with its arrays where they are kept."""
        return state
