"""Agreement of processes before a sharded step: all can make it, and it is the same step.

At the first step on a mesh, processes exchange errors, and compare everything that must be the same. They do
this again before every step in which they exchange anything. Other steps of shards need no exchange: state
that agreed once stays equal while every process runs the same step. Whether it did, each hundredth step asks:
a scheduler may be fed with a loss of one process, and a process may lack a gradient.
"""

from collections.abc import Sequence
from typing import Any

from halfstep_torch.distributed.agreement import agree, any_of
from halfstep_torch.distributed.shards import Mesh, sharding
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.slots import Slot
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.sharded.exchange import meshes_of

_EVERY = 100


class Agreement:
    """The agreements between the processes of meshes, over the steps of an optimizer."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._compared: set[Mesh] = set()
        self._talking: set[Mesh] = set()
        self._meshes: Sequence[Mesh] = ()
        self._asked: list[Mesh] = []
        self._steps = 0

    def begin(self, meshes: Sequence[Mesh], together: bool) -> None:
        """Begin a step of parameters on some meshes, the same ones in all processes."""
        # Released gradients come one by one: a process that lacks one makes no step of it.
        self._steps += together
        all_asked = together and self._steps % _EVERY == 0
        self._meshes, self._asked = meshes, []
        for mesh in meshes:
            if all_asked or mesh not in self._compared or mesh in self._talking:
                self._asked.append(mesh)

    def agree_on(self, error: Exception | None, launch: Any) -> None:  # a Launch, if no error
        """Raise in all processes if any has an error, or their launches are not the same step."""
        if not (self._meshes or error):
            return
        notes = [_notes(mesh, [] if error else [*launch.batches, *launch.on_meta]) for mesh in self._asked]
        agree(self._caller, self._asked, error, notes)
        self._compared.update(self._asked)
        self._talking.difference_update(self._asked)
        self._talking.update(launch.talking)

    def agree(self, error: Exception | None) -> None:
        """Raise in all processes if any has an error."""
        if self._asked or error:
            agree(self._caller, self._asked, error, [{} for _ in self._asked])

    def any_of(self, here: bool) -> bool:
        """Return whether a condition holds in any process of the meshes."""
        return any_of(self._meshes, here)


def _notes(mesh: Mesh, batches: Sequence[Batch]) -> dict[str, object]:
    """Return, by name, the values that must be equal in all processes of a mesh."""
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
        "numbers of the param groups": {
            f"{key} of group {group.index}": x
            for group in groups.values()
            for key, x in _numbers(group.entries).items()
        },
    }


def _formats(slot: Slot) -> str:
    arrays = slot.whole_plan.arrays.items()
    return ", ".join(
        f"{key}: {spec.dtype}, {spec.scale_of and spec.scale_of.block_size}" for key, spec in arrays
    )


def _numbers(entries: Group) -> dict[str, str]:
    """Return the entries that are numbers or names; a schedule shows its current rate."""
    kinds = (bool, int, float, str, tuple)
    return {key: str(value) for key, value in sorted(entries.items()) if isinstance(value, kinds)}
