"""Collectives for many leaves at once, because their latency costs more than their bytes.

A mesh with several dimensions needs one collective along each, so only the user's process groups are used.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.arrays import Array
from halfstep_torch.distributed.shards import (
    Mesh,
    counts_here,
    is_sharded,
    local_part,
    mesh_sizes,
    windows_of_all,
)

T = TypeVar("T")
_ALIGNED = 16


def groups_of(mesh: Mesh) -> "list[dist.ProcessGroup]":
    """Return a mesh's process groups, one for each dimension. Raise RuntimeError if they were destroyed."""
    try:
        return mesh.get_all_groups()
    except Exception as error:
        raise RuntimeError(
            f"halfstep_torch: the process groups of the mesh of shape {mesh_sizes(mesh)} are gone, and its "
            "shards exchange words. Call destroy_process_group when all steps are made. Nothing was changed."
        ) from error


def reduce_max(x: Tensor, mesh: Mesh) -> Tensor:
    """Replace each element by its maximum over a mesh's processes, in place, and return the tensor."""
    for group in groups_of(mesh):
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def reduce_sum(x: Tensor, mesh: Mesh) -> Tensor:
    """Replace each element by its sum over a mesh's processes, in place, and return the tensor."""
    for group in groups_of(mesh):
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def total_counts(owners: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the sums of the parameters' counts over all processes, by one collective for each mesh.

    `counts` has some numbers for each of the `owners`, counted in its local part.
    """
    totals = [tuple(numbers) for numbers in counts]
    places = [i for i, owner in enumerate(owners) if is_sharded(owner)]
    for mesh, of_mesh in by_mesh(places, lambda i: owners[i]).items():
        here = [counts[i] if counts_here(owners[i]) else [0] * len(counts[i]) for i in of_mesh]
        told = torch.tensor(here, dtype=torch.int64, device=mesh.device_type)
        for i, numbers in zip(of_mesh, reduce_sum(told, mesh).tolist(), strict=True):
            totals[i] = tuple(numbers)
    return totals


def gather(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the tensors of all processes as rows, in row-major order of their coordinates."""
    rows = x.reshape(1, -1)
    for size, group in reversed(list(zip(mesh_sizes(mesh), groups_of(mesh), strict=True))):
        gathered = rows.new_empty(size, *rows.shape)
        dist.all_gather(list(gathered), rows, group=group)
        rows = gathered.flatten(0, 1)
    return rows


def gather_whole(tensors: Sequence[Array]) -> list[Tensor]:
    """Return DTensors of one mesh as whole tensors in every process, by one exchange of bytes."""
    windows = [windows_of_all(x) for x in tensors]
    lengths = [
        -(-max(math.prod(window.shape) for window in of_tensor) * x.element_size() // _ALIGNED) * _ALIGNED
        for x, of_tensor in zip(tensors, windows, strict=True)
    ]
    sent = torch.zeros(sum(lengths), dtype=torch.uint8, device=tensors[0].device)
    for x, part in zip(tensors, sent.split(lengths), strict=True):
        local = local_part(x).detach().contiguous().reshape(-1).view(torch.uint8)
        part[: len(local)] = local
    parts = gather(sent, tensors[0].device_mesh).split(lengths, dim=1)
    whole = []
    for x, received, of_tensor in zip(tensors, parts, windows, strict=True):
        array = torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
        for row, window in zip(received, of_tensor, strict=True):
            piece = row[: math.prod(window.shape) * x.element_size()].view(x.dtype)
            array[window.box] = piece.view(window.shape)
        whole.append(array)
    return whole


def reduce_together(tensors: Sequence[Tensor], groups: "Iterable[dist.ProcessGroup]") -> list[Tensor]:
    """Return the sums of tensors with one dtype over process groups, one group after another."""
    summed = torch.cat([x.reshape(-1) for x in tensors])
    for group in groups:
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=group)
    parts = summed.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def by_mesh(items: Iterable[T], of: Callable[[T], Array] = lambda x: x) -> dict[Mesh, list[T]]:
    """Group values by the mesh of their DTensors, in order of appearance."""
    sorted_out: dict[Mesh, list[T]] = {}
    for item in items:
        sorted_out.setdefault(of(item).device_mesh, []).append(item)
    return sorted_out
