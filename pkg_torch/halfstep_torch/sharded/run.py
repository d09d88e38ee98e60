"""Running batches with rules that read more than the local part: they share one exchange."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from halfstep_torch.distributed.norms import Share, SharedNorms, exchange
from halfstep_torch.distributed.shards import is_sharded
from halfstep_torch.distributed.whole_arrays import Spread, map_whole
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.run import Leaving, step_array
from halfstep_torch.sharded.slots import PartSlot


@dataclasses.dataclass(eq=False)
class Piece:
    """A slot's part of an update that a rule reads whole.

    Attributes:
        slot: the parameter.
        u: the update that comes to the rule. After the exchange, the update that leaves the rule.
        function: the rule, of the whole update.
    """

    slot: PartSlot
    u: Tensor
    function: Callable[[Tensor], Tensor]


def exchange_all(asked: Sequence[Share | Piece]) -> None:
    """Exchange the requests that the batches of all processes wait for."""
    exchange([x for x in asked if isinstance(x, Share)])
    _map_whole(x for x in asked if isinstance(x, Piece))


def step_apart(batch: Batch, k: int, arriving: Mapping[int, Tensor]) -> Leaving:
    """Run the k-th stage on sharded parameters; return the outgoing updates."""
    needs_only_update = batch.plan.padded_stages[k].needs_only_update
    return (_step_whole if needs_only_update else _step_by_norms)(batch, k, arriving)


def _step_by_norms(batch: Batch, k: int, arriving: Mapping[int, Tensor]) -> Leaving:
    """Run a stage that reads norms of sharded parameters."""
    leaving: dict[int, Tensor] = {}
    shared: dict[int, tuple[SharedNorms, Tensor]] = {}
    for place, u in arriving.items():
        owner = batch.slots[place].owner
        assert is_sharded(owner)
        shared[place] = SharedNorms(owner, batch.slots[place].index), u
    while shared:
        for place, (op, u) in shared.items():
            op.begin()
            leaving[place] = step_array(batch, k, place, u, op)
        shared = {place: (op, u) for place, (op, u) in shared.items() if op.shares}
        if shared:
            yield [share for op, _ in shared.values() for share in op.shares]
    return leaving


def _step_whole(batch: Batch, k: int, arriving: Mapping[int, Tensor]) -> Leaving:
    """Run a stage that reads whole updates: one process computes each, for all that hold a part."""
    stage, pieces = batch.plan.padded_stages[k], {}
    for place, u in arriving.items():
        slot = batch.slots[place]
        assert isinstance(slot, PartSlot)
        function = functools.partial(stage.run_on_update, numbers=batch.stage_numbers(k)[batch.steps[place]])
        pieces[place] = Piece(slot, u, function)
    if pieces:
        yield list(pieces.values())
    return {place: piece.u for place, piece in pieces.items()}


def _map_whole(pieces: Iterable[Piece]) -> None:
    """Run the functions of pieces on the whole updates; every process has the same parameters' pieces."""
    ordered, arrays = sorted(pieces, key=lambda piece: piece.slot.index), []
    for piece in ordered:
        owner = piece.slot.owner
        assert is_sharded(owner)
        arrays.append(Spread(owner, piece.u, piece.function))
    for piece, local in zip(ordered, map_whole(arrays), strict=True):
        piece.u = local.contiguous()
