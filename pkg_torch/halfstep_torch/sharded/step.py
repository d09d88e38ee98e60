"""How parameters are stepped where some are DTensors: what processes exchange around their steps.

At the first step on a mesh, processes exchange errors, and compare everything that must be the same. They do
this again before every step in which they exchange anything. Other steps of shards need no exchange: state
that agreed once stays equal while every process runs the same step. Whether it did, each hundredth step asks:
a scheduler may be fed with a loss of one process, and a process may lack a gradient.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from halfstep_torch.distributed.agreement import Attempt, agree, any_of
from halfstep_torch.distributed.shards import check_sharding, is_sharded, sharding
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.slots import Slot, count
from halfstep_torch.engine.whole_step import WholeStep
from halfstep_torch.sharded.cut_blocks import CutBlocks
from halfstep_torch.sharded.exchange import exchanged, meshes_of, scatter, talking_meshes
from halfstep_torch.sharded.run import run_batches
from halfstep_torch.sharded.slots import sharded_slots

_EVERY = 100


class ShardedStep(WholeStep):
    """The steps of an optimizer with DTensors, and what the processes of their meshes have agreed on."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._compared: set[Any] = set()
        self._talking: set[Any] = set()
        self._meshes: list[Any] = []
        self._asked: list[Any] = []
        self._steps = 0

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group."""
        if not is_sharded(param):
            return super().slots_of(group, name, param)
        check_sharding(group.caller, name, param)
        return sharded_slots(param, name, group.plan(name, param))

    @contextlib.contextmanager
    def agreed_batches(self, params: Iterable[Tensor], batches: Sequence[Batch]) -> Iterator[None]:
        """Raise in all processes if any has an error, or they are not to make the same step."""
        params = list(params)
        # Released gradients come one by one: a process that lacks one makes no step of it.
        self._steps += len(params) > 1
        all_asked = len(params) > 1 and self._steps % _EVERY == 0
        self._meshes = meshes_of(params)
        asked = [
            mesh for mesh in self._meshes if all_asked or mesh not in self._compared or mesh in self._talking
        ]
        self._asked = asked  # the same ones in all processes
        with Attempt() as attempt:
            yield
        agree(self._caller, asked, attempt.error, [_notes(mesh, batches) for mesh in asked])
        self._compared.update(asked)
        self._talking.difference_update(asked)
        self._talking.update(talking_meshes(batches))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise in all processes if any has an error."""
        with Attempt() as attempt:
            yield
        agree(self._caller, self._asked, attempt.error, [{} for _ in self._asked])

    def any_of(self, here: bool) -> bool:
        """Return whether it is so in any process of the meshes."""
        return any_of(self._meshes, here)

    def exchanged(self, batches: Sequence[Batch]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which gradients, and gathered weights, are where weights are stepped."""
        return exchanged(batches)

    def run(self, batches: Sequence[Batch]) -> None:
        """Step the batches, with one scale for every block, whatever processes have of it, and count them."""
        cut_blocks = CutBlocks(batches)
        cut_blocks.agree()
        run_batches(batches)
        scatter(batches)
        cut_blocks.share()
        count([slot for batch in batches for slot in batch.slots])


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
