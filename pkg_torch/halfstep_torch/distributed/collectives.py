"""What processes tell each other, each thing for many leaves at once: a collective costs more than its bytes.

A mesh of several dimensions takes one collective along each: every process group of it is one that its user
has made.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep_torch.distributed.shards import local_part, mesh_sizes, windows_of_all

_ALIGNED = 16


def reduce_max(x: Tensor, mesh: Any) -> Tensor:
    """Make every element of a tensor the largest of all processes of a mesh, in place; return it."""
    for group in mesh.get_all_groups():
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def reduce_sum(x: Tensor, mesh: Any) -> Tensor:
    """Make every element of a tensor the sum over all processes of a mesh, in place; return it."""
    for group in mesh.get_all_groups():
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def gather(x: Tensor, mesh: Any) -> Tensor:
    """Return the tensors of all processes, one row each, in row-major order of their coordinates."""
    rows = x.reshape(1, -1)
    for size, group in reversed(list(zip(mesh_sizes(mesh), mesh.get_all_groups(), strict=True))):
        gathered = rows.new_empty(size, *rows.shape)
        dist.all_gather(list(gathered), rows, group=group)
        rows = gathered.flatten(0, 1)
    return rows


def gather_whole(tensors: Sequence[Any]) -> list[Tensor]:
    """Return all of some DTensors, of one mesh, in every process: one exchange of bytes for all."""
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


def reduce_together(tensors: Sequence[Tensor], groups: Iterable[Any]) -> list[Tensor]:
    """Return the sums of tensors of one dtype over process groups, one group after the other."""
    summed = torch.cat([x.reshape(-1) for x in tensors])
    for group in groups:
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=group)
    parts = summed.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def by_mesh(items: Iterable[Any], of: Callable[[Any], Any] = lambda x: x) -> dict[Any, list[Any]]:
    """Return what is `of` DTensors by their mesh, both in the order in which they come."""
    sorted_out: dict[Any, list[Any]] = {}
    for item in items:
        sorted_out.setdefault(of(item).device_mesh, []).append(item)
    return sorted_out
