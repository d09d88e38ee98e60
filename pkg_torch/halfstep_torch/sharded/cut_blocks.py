"""Blocks that shard borders cut: processes exchange the scale of the whole block.

    a run of a parameter     | block | block | block | block |-
    two processes            |-----------------|--------------|
    parts of the first       | whole blocks  |a|
    parts of the second                        |b| whole blocks

The scale byte of a block is the largest byte that its pieces would choose, whatever the format. So pieces
(`a`, `b`) are stepped twice. The first time is for their bytes, of which all processes take the largest, by
one collective for all leaves of a mesh; nothing is written. The second time, pieces are stepped with these
bytes, as the whole blocks are. Codes lie beside the weights. Every process has all scales, a byte per block:
one more collective brings it the new scales.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.collectives import by_mesh, reduce_max
from halfstep_torch.distributed.shards import Mesh, local_part
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.run import step_rows
from halfstep_torch.sharded.action import Action
from halfstep_torch.sharded.slots import PartSlot
from halfstep_torch.storage.stored_moment import min_scale_key, scale_key


@dataclasses.dataclass
class _Leaf:
    """A parameter whose blocks are cut.

    Attributes:
        slots: its parts here.
        scales: of each array of scales the bytes of all blocks, as processes are to share them.
    """

    slots: list[PartSlot]
    scales: dict[str, Tensor]


class CutBlocks(Action):
    """The scales of all cut blocks in a step."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        slots = [
            slot for batch in batches for slot in batch.slots if isinstance(slot, PartSlot) and slot.part
        ]
        # In another process parts may come in other batches: parameters have one order everywhere.
        self.slots: Sequence[PartSlot] = sorted(slots, key=lambda slot: slot.index)
        self._batches = [batch for batch in batches if batch.slots[0].cuts]
        self._leaves: list[_Leaf] = []
        self._shared: list[tuple[Mesh, Tensor]] = []

    def begin(self) -> None:
        """Set the scales of all pieces; the parameters do not change."""
        self.forget()
        by_index: dict[int, list[PartSlot]] = {}
        for slot in self.slots:
            by_index.setdefault(slot.index, []).append(slot)
        for mesh, leaves in by_mesh(by_index.values(), lambda parts: parts[0].owner).items():
            self._share(mesh, leaves)
        self._agree()

    def _share(self, mesh: Mesh, leaves: Sequence[list[PartSlot]]) -> None:
        arrays = [(parts, key) for parts in leaves for key in parts[0].arrays if _is_scale(parts[0], key)]
        sizes = [parts[0].arrays[key].numel() for parts, key in arrays]
        shared = torch.zeros(sum(sizes), dtype=torch.uint8, device=leaves[0][0].param.device)
        self._shared.append((mesh, shared))
        views: dict[int, _Leaf] = {}
        for (parts, key), view in zip(arrays, shared.split(sizes), strict=True):
            views.setdefault(parts[0].index, _Leaf(parts, {})).scales[key] = view
        self._leaves += views.values()

    def _agree(self) -> None:
        for slot in self.slots:
            for key in slot.scales.keys() & slot.arrays.keys():
                slot.scales[key].copy_(slot.scales_in(key, local_part(slot.arrays[key])))
        slots = [slot for leaf in self._leaves for slot in leaf.slots if slot.cuts]
        for slot in slots:
            for key in slot.scales.keys() - slot.arrays.keys():
                slot.scales[key].zero_()
        # A moment in units of another moment is rounded after that moment: twice, if both have scales.
        depths = [_depths(leaf.slots[0]) for leaf in self._leaves]
        for depth in range(max((max(of_leaf.values()) for of_leaf in depths), default=-1) + 1):
            for batch in self._batches:
                _choose_scales(batch)
            self._reduce(slots)
            for leaf, of_leaf in zip(self._leaves, depths, strict=True):
                for slot in leaf.slots:
                    for key, array in slot.arrays.items():
                        if key not in of_leaf:
                            continue
                        slot.scales[key].copy_(slot.scales_in(key, local_part(array)))
                        if slot.cuts and of_leaf[key] <= depth:
                            slot.scales[min_scale_key(key)].copy_(slot.scales_in(key, leaf.scales[key]))

    def end(self) -> None:
        """Share the scales of all stepped blocks with every process."""
        self._reduce([slot for leaf in self._leaves for slot in leaf.slots])
        for leaf in self._leaves:
            for key, scales in leaf.scales.items():
                array = local_part(leaf.slots[0].arrays[key])
                array.copy_(scales.view(array.shape))

    def forget(self) -> None:
        """Drop the memory of the shared scales."""
        self._leaves, self._shared = [], []

    def _reduce(self, slots: Iterable[PartSlot]) -> None:
        leaves = {leaf.slots[0].index: leaf for leaf in self._leaves}
        for _, shared in self._shared:
            shared.zero_()
        for slot in slots:
            if slot.param.numel():
                for key, scales in leaves[slot.index].scales.items():
                    slot.scales_in(key, scales).copy_(slot.scales[key])
        for mesh, shared in self._shared:
            reduce_max(shared, mesh)


def _choose_scales(batch: Batch) -> None:
    """Step pieces in scratch memory, to keep only their scales."""
    all_rows: list[Any]  # PackedRows, as cut blocks are always copied
    for places, (all_rows, *_) in batch.rows:
        grads = {place: batch.slots[place].grad for place in places}
        for rows in all_rows:
            rows.load(grads, None)
            step_rows(batch, 0, rows)
            rows.write_scales_back()


def _is_scale(slot: PartSlot, key: str) -> bool:
    return slot.whole_plan.arrays[key].scale_of is not None


def _depths(slot: PartSlot) -> dict[str, int]:
    """Return for each array of scales how many others it depends on."""
    moments = slot.whole_plan.moments
    scaled = {moment.name for moment in moments if moment.format.scaled}
    return {scale_key(moment.key): int(moment.unit in scaled) for moment in moments if moment.name in scaled}
