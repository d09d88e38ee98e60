"""Gathering of gradients and parameters before a sharded step, and copying back after it."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from halfstep.arrays import Array
from halfstep_torch.distributed.collectives import by_mesh, gather_whole, reduce_together
from halfstep_torch.distributed.shards import Mesh, from_local, is_sharded, local_part, window_of
from halfstep_torch.engine.batches import Batch
from halfstep_torch.sharded.action import Action
from halfstep_torch.sharded.slots import PartSlot, is_elsewhere, slots_in


class Gathering(Action):
    """Moves gradients to their weights, and gathers whole parameters in every process, for one step."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        slots = slots_in(batches)
        self.slots = [slot for slot in slots if slot.gathered or is_elsewhere(slot.owner)]

    def bring(self) -> None:
        """Bring them."""
        # Processes have different numbers of slots of a parameter, and the same parameters.
        owners = list(dict.fromkeys(slot.owner for slot in self.slots))
        placed = dict(zip(owners, _placed_grads(owners), strict=True))
        for slot in self.slots:
            slot.placed_grad = local_part(placed[slot.owner])
        _gather([slot for slot in self.slots if slot.gathered], placed)

    def end(self) -> None:
        """Copy the local part of stepped, gathered weights back to the parameters."""
        for slot in self.slots:
            if slot.gathered:
                local_part(slot.owner).detach().copy_(slot.param[window_of(slot.owner).box])

    def forget(self) -> None:
        """Drop the gathered tensors."""
        for slot in self.slots:
            slot.placed_grad = None
            if slot.gathered:
                slot.param = None


def meshes_of(params: Iterable[Tensor]) -> list[Mesh]:
    """Return the distinct meshes of the DTensors among parameters, in their order."""
    return list(by_mesh(filter(is_sharded, params)))


def talking_meshes(batches: Sequence[Batch]) -> list[Mesh]:
    """Return the meshes with an exchange between processes in the steps of these batches."""
    measured = {id(slot) for batch in batches if batch.measuring for slot in batch.slots}
    talking = (
        slot.owner
        for slot in slots_in(batches)
        if slot.exchanges or is_elsewhere(slot.owner) or id(slot) in measured
    )
    return meshes_of(talking)


def _gather(slots: Sequence[PartSlot], placed: Mapping[Tensor, Tensor]) -> None:
    for of_mesh in by_mesh(slots, lambda slot: slot.owner).values():
        whole = gather_whole([tensor for slot in of_mesh for tensor in (slot.owner, placed[slot.owner])])
        for slot, param, grad in zip(of_mesh, whole[::2], whole[1::2], strict=True):
            slot.param, slot.placed_grad = param, grad


def _placed_grads(params: Sequence[Array]) -> list[Array]:
    """Return the gradients of DTensors, in the placements of their weights.

    Under sequence parallelism every process has a summand of the gradient of a replicated parameter, as the
    weight of a norm. Summands of many gradients are added up together.
    """
    grads = [param.grad.detach() for param in params]
    summed: dict[tuple, list[int]] = {}
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if not is_elsewhere(param):
            continue
        pairs = list(zip(param.placements, grad.placements, strict=True))
        if all(to == at or (to.is_replicate() and at.is_partial("sum")) for to, at in pairs):
            dims = tuple(dim for dim, (to, at) in enumerate(pairs) if to != at)
            summed.setdefault((param.device_mesh, dims, grad.dtype, grad.device), []).append(i)
        else:
            grads[i] = grad.redistribute(placements=param.placements)
    for (mesh, dims, *_), places in summed.items():
        sums = reduce_together([local_part(grads[i]) for i in places], [mesh.get_group(dim) for dim in dims])
        for i, local in zip(places, sums, strict=True):
            grads[i] = from_local(local, params[i], params[i].placements, tuple(params[i].shape))
    return grads
