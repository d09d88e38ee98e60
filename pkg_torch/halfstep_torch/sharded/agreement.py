"""When the processes of an optimizer's meshes talk before a step, and about what.

They do at the first step on a mesh, and before every step in which they exchange anything anyhow. Other steps
of shards need no word: what was the same once stays so, as all processes do the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from halfstep_torch.distributed.agreement import agree
from halfstep_torch.distributed.shards import sharding
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.slots import Slot
from halfstep_torch.sharded.exchange import meshes_of, talking_meshes


class Agreement:
    """What the processes of an optimizer have agreed on, mesh by mesh."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._compared: set[Any] = set()
        self._talking: set[Any] = set()

    def begin(self, params: Iterable[Any]) -> list[Any]:
        """Return the meshes whose processes talk before this step: the same ones in all of them."""
        return [mesh for mesh in meshes_of(params) if mesh not in self._compared or mesh in self._talking]

    def on_step(self, meshes: Sequence[Any], error: BaseException | None, batches: Sequence[Batch]) -> None:
        """Raise in all processes of the meshes if any has an error, or they are not to make the same step."""
        agree(self._caller, meshes, error, [_notes(mesh, batches) for mesh in meshes])
        self._compared.update(meshes)
        self._talking.difference_update(meshes)
        self._talking.update(talking_meshes(batches))

    def on_success(self, meshes: Sequence[Any], error: BaseException | None) -> None:
        """Raise in all processes of the meshes if any has an error."""
        agree(self._caller, meshes, error, [{} for _ in meshes])


def _notes(mesh: Any, batches: Sequence[Batch]) -> dict[str, Any]:
    """Return what is to be the same in all processes of a mesh, by what it is called."""
    pairs = [(batch.group, slot) for batch in batches for slot in batch.slots]
    pairs = [(group, slot) for group, slot in pairs if mesh in meshes_of([slot.owner])]
    groups = {group.index: group for group, _ in sorted(pairs, key=lambda pair: pair[0].index)}
    leaves = {slot.index: [slot.name, *slot.owner.shape] for _, slot in pairs}
    return {
        "parameters with gradients": [leaves[index] for index in sorted(leaves)],
        "seeds": [[str(link.seed) for link in group.links] for group in groups.values()],
        "steps": sorted({slot.step for _, slot in pairs}),
        "placements": sorted({str(sharding(slot.owner)) for _, slot in pairs}),
        "formats of the state": sorted({_formats(slot) for _, slot in pairs}),
        "numbers of the param groups": [_numbers(group.entries) for group in groups.values()],
    }


def _formats(slot: Slot) -> str:
    arrays = slot.whole_plan.arrays.items()
    return ", ".join(
        f"{key}: {spec.dtype}, {spec.scale_of and spec.scale_of.block_size}" for key, spec in arrays
    )


def _numbers(entries: Any) -> dict[str, str]:
    """Return the entries that are numbers or names; an lr that is a function shows its number."""
    kinds = (bool, int, float, str, tuple)
    return {key: str(value) for key, value in sorted(entries.items()) if isinstance(value, kinds)}
