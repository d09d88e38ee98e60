"""Rules that read norms of which other processes have parts: parameters wait, then norms are exchanged."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from halfstep_torch.distributed.norms import SharedNorms, exchange
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.run import Leaving, step_array, walks
from halfstep_torch.sharded.slots import ShardedSlot


def run_batches(batches: Sequence[Batch]) -> None:
    """Step the slots of batches in place.

    Where a rule reads norms, parameters wait until all that do so have come to that rule. Their updates stand
    in float32 meanwhile.
    """
    all_walks = (walk for batch in batches for walk in walks(batch, _step_arrays))
    waiting = [(walk, shares) for walk in all_walks if (shares := next(walk, None))]
    while waiting:
        exchange([share for _, shares in waiting for share in shares])
        waiting = [(walk, shares) for walk, _ in waiting if (shares := next(walk, None))]


def _step_arrays(batch: Batch, k: int, arriving: Mapping[int, Tensor]) -> Leaving:
    """Run the k-th stage on parameters, each in its shape; return the updates that it leaves."""
    leaving: dict[int, Tensor] = {}
    shared: dict[int, tuple[SharedNorms, Tensor]] = {}
    for place, u in arriving.items():
        slot = batch.slots[place]
        if isinstance(slot, ShardedSlot) and slot.shares_norms:
            shared[place] = SharedNorms(slot.owner, slot.index), u
        else:
            leaving[place] = step_array(batch, k, place, u)
    while shared:
        for place, (op, u) in shared.items():
            op.begin()
            leaving[place] = step_array(batch, k, place, u, op)
        shared = {place: (op, u) for place, (op, u) in shared.items() if op.shares}
        if shared:
            yield [share for op, _ in shared.values() for share in op.shares]
    return leaving
