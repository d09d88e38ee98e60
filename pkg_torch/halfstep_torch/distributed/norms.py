"""The norm of tensors that lie in several processes: one collective per mesh, or two. Contract: N1, N2."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.collectives import gather, reduce_max, reduce_sum
from halfstep_torch.distributed.shards import is_sharded
from halfstep_torch.numbers.global_norm import global_norm, largest_pattern, root_of, sum_of_squares
from halfstep_torch.numbers.norms import norm


def norm_of_shards(tensors: Sequence[Tensor], owners: Sequence[Any], *, exact: bool = False) -> Tensor:
    """Return the norm of all elements of all tensors, the same in all processes that have some.

    `tensors` are in this process, and `owners` the parameters that they belong to: of a DTensor a shard, of a
    plain tensor all of it. An element that several processes have counts once.

    With `exact` it has the bits of `global_norm` of the whole tensors, by two collectives for all tensors of
    a mesh: the largest magnitude, then the sum of integers. Otherwise it is the norm of the processes' norms,
    in one order everywhere, by one collective: within N1's bound of what one process would have.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for i, owner in enumerate(owners):
        mesh = owner.device_mesh if is_sharded(owner) else None
        counted = mesh is None or _counts_here(owner)
        by_mesh.setdefault(mesh, []).extend([tensors[i]] if counted else [])
    meshes = [mesh for mesh in by_mesh if mesh is not None]
    if not meshes:
        return global_norm(tensors, exact=exact)
    device = tensors[0].device
    if not exact:
        norms = [global_norm(of_mesh).to(device).view(1) for of_mesh in by_mesh.values()]
        gathered = [x if mesh is None else gather(x, mesh) for x, mesh in zip(norms, by_mesh, strict=True)]
        return norm(torch.cat([x.view(-1) for x in gathered]))
    largest = torch.stack([largest_pattern(of_mesh, device) for of_mesh in by_mesh.values()])
    for i, mesh in enumerate(by_mesh):
        if mesh is not None:
            reduce_max(largest[i : i + 1], mesh)
    largest = largest.amax()
    sums = torch.stack([sum_of_squares(of_mesh, largest) for of_mesh in by_mesh.values()])
    for i, mesh in enumerate(by_mesh):
        if mesh is not None:
            reduce_sum(sums[i], mesh)
    return root_of(sums.sum(0), largest)


def _counts_here(owner: Any) -> bool:
    """Whether this process counts its elements of a DTensor: the first one, of those that have the same."""
    places = zip(owner.placements, owner.device_mesh.get_coordinate(), strict=True)
    return all(place == 0 for placement, place in places if placement.is_replicate())
