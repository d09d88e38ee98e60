"""How a sharded parameter is stepped, and its state placed: by plan and placement alone.

So all processes decide alike.
"""

from typing import Literal

from torch import Tensor

from halfstep_torch.distributed.placement import array_placements
from halfstep_torch.distributed.shards import DTensor, Placements, is_sharded, replicated, windows_of_all
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.plan import Plan


def how_stepped(plan: Plan, param: DTensor) -> Literal["here", "gathered"]:
    """Return how a DTensor is stepped: here or gathered."""
    windows = windows_of_all(param)
    if all(window.is_full for window in windows):
        return "here"
    if not all(
        stage.needs_only_update or rule.needs_only_norms for stage in plan.stages for rule in stage.rules
    ):
        return "gathered"
    if any(array_placements(spec, param) is None for spec in plan.arrays.values()):
        return "gathered"
    return "here" if all(_has_rows(plan.within(window), window) for window in windows) else "gathered"


def _has_rows(plan: Plan, window: Window) -> bool:
    """Whether a row of whole blocks is contiguous in the parameter."""
    if window.is_empty or window.is_full:
        return True
    units = (
        stage.width if stage.padded is stage else stage.blocks[0].unit
        for stage in plan.stages
        if stage.blocks
    )
    return all(window.run % unit == 0 for unit in units)


def state_placements(plan: Plan, param: Tensor) -> dict[str, Placements]:
    """Return the placements of a sharded parameter's state arrays; {} for a plain tensor."""
    if not is_sharded(param):
        return {}
    way, whole = how_stepped(plan, param), replicated(param)
    if way == "gathered":
        return dict.fromkeys(plan.arrays, whole)
    return {key: array_placements(spec, param) or whole for key, spec in plan.arrays.items()}
