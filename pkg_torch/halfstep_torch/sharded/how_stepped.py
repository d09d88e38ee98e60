"""How a sharded parameter is stepped, and its state placed: by plan and placement alone.

So all processes decide alike.
"""

from typing import Literal

from torch import Tensor

from halfstep.storage.blocks import block_layout
from halfstep_torch.distributed.placement import array_placements
from halfstep_torch.distributed.shards import DTensor, Placements, is_sharded, replicated, windows_of_all
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.stage import LONGEST_BLOCK

Layout = tuple[int, int, int]
"""Of an array in blocks the number of leading axes, the length of a run, the elements of a block."""


def how_stepped(plan: Plan, param: DTensor) -> Layout | Literal["here", "gathered"]:
    """Return how a DTensor is stepped: here, gathered, or by the layout of blocks that borders cut."""
    windows = windows_of_all(param)
    if all(window.is_full for window in windows):
        return "here"
    if not all(
        stage.needs_only_update or rule.needs_only_norms for stage in plan.stages for rule in stage.rules
    ):
        return "gathered"
    if any(array_placements(spec, param) is None for spec in plan.arrays.values()):
        return _cut_layout(plan, param) or "gathered"
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


def _cut_layout(plan: Plan, param: DTensor) -> Layout | None:
    """Return the layout of cut blocks whose scales processes exchange; None if they cannot be stepped so.

    An exchange of scales is enough under three conditions. Codes can be placed as the weights are. Every
    process has one stretch of each run. The coarsest blocks hold whole blocks of the other formats.
    """
    scales = [spec for spec in plan.arrays.values() if spec.scale_of]
    others = [spec for spec in plan.arrays.values() if not spec.scale_of]
    formats = [spec.scale_of for spec in scales if spec.scale_of and spec.scale_of.blocks]
    if (
        any(array_placements(spec, param) is None for spec in others)
        or any(spec.shape_of for spec in scales)
        or not param.is_contiguous()
        or any(moment.again for moment in plan.moments)
        or any(moment.keep_nonzero == "where_nonnegative" for moment in plan.moments)
        or any(key not in plan.stages[0].arrays for key, spec in plan.arrays.items() if spec.scale_of)
    ):
        return None
    layouts = [block_layout(tuple(param.shape), fmt.block_size) for fmt in formats]
    sizes = {fmt.blocks.size for fmt in formats if fmt.blocks}
    (leading, run, _), size = max(layouts, key=lambda layout: layout[1]), max(sizes)
    # Where shorter runs end with a block, their blocks are those of the longest ones.
    alike = all(shorter == run or shorter % of_block == 0 for _, shorter, of_block in layouts)
    axis = len(leading)
    if size >= run:  # a piece is a row of its own, whatever its length
        fits = len(sizes) == 1 and not any(fmt.dithered for fmt in formats)
    else:
        odd = any(fmt.packed and fmt.blocks.size % 2 for fmt in formats if fmt.blocks)
        fits = size <= LONGEST_BLOCK and not odd and all(size % other == 0 for other in sizes)
    in_one_stretch = all(
        window.is_empty or window.shape[axis + 1 :] == window.whole[axis + 1 :]
        for window in windows_of_all(param)
    )
    return (axis, run, size) if fits and alike and in_one_stretch else None


def state_placements(plan: Plan, param: Tensor) -> dict[str, Placements]:
    """Return the placements of a sharded parameter's state arrays; {} for a plain tensor."""
    if not is_sharded(param):
        return {}
    way, whole = how_stepped(plan, param), replicated(param)
    if way == "gathered":
        return dict.fromkeys(plan.arrays, whole)
    return {
        key: whole if spec.scale_of and way != "here" else array_placements(spec, param) or whole
        for key, spec in plan.arrays.items()
    }
