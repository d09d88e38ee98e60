"""Functions of whole sharded arrays, with each process computing some of the arrays.

    round    process 0   process 1   process 2      of seven arrays, the most costly first
      0          a           b           c          each process gets the elements of its array from all,
      1          f           e           d          computes, and sends all processes their elements
      2                                  g

So no process has more than one whole array at a time, and no array is computed twice.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep_torch.distributed.collectives import by_mesh, groups_of
from halfstep_torch.distributed.shards import (
    DTensor,
    Mesh,
    coordinate_in,
    mesh_sizes,
    rank_in,
    windows_of_all,
)
from halfstep_torch.distributed.window import Window


class Spread(NamedTuple):
    """A sharded array, and a function of the whole array.

    Attributes:
        like: a DTensor with its placements.
        local: the part in this process, in float32.
        function: a function from the whole array to another array of the same shape.
    """

    like: DTensor
    local: Tensor
    function: Callable[[Tensor], Tensor]

    @property
    def windows(self) -> list[Window]:
        """The windows of all processes of the mesh."""
        return windows_of_all(self.like)

    @property
    def cost(self) -> int:
        """The relative work, as multiplications of the matrix with its transpose."""
        rows, numel = max(self.like.shape[0], 1), self.like.numel()
        return numel * min(rows, numel // rows)

    def sends(self, holder: tuple, computing: tuple) -> bool:
        """Whether a process, given by coordinates, sends to another, as the nearest replica does."""
        places = zip(self.like.placements, holder, computing, strict=True)
        return all(at == to for placement, at, to in places if placement.is_replicate())


def map_whole(arrays: Sequence[Spread]) -> list[Tensor]:
    """Return the local elements of each array's function.

    All processes of a mesh must have the same arrays, in the same order.
    """
    made: dict[int, Tensor] = {}
    for mesh, places in by_mesh(range(len(arrays)), lambda i: arrays[i].like).items():
        for at_once in _rounds(places, [arrays[i].cost for i in places], mesh.size()):
            parts = _map_round({rank: arrays[i] for rank, i in at_once.items()}, mesh)
            made.update((i, parts[rank]) for rank, i in at_once.items())
    return [made[i] for i in range(len(arrays))]


def _rounds(places: Sequence[int], costs: Sequence[int], count: int) -> Iterator[dict[int, int]]:
    """Yield the array for each of `count` processes. The next array goes to the least busy process."""
    shares: list[list[int]] = [[] for _ in range(count)]
    busy = [(0, rank) for rank in range(count)]
    for cost, i in sorted(zip(costs, places, strict=True), key=lambda pair: (-pair[0], pair[1])):
        work, rank = heapq.heappop(busy)
        shares[rank].append(i)
        heapq.heappush(busy, (work + cost, rank))
    for row in itertools.zip_longest(*shares):
        yield {rank: i for rank, i in enumerate(row) if i is not None}


def _map_round(arrays: Mapping[int, Spread], mesh: Mesh) -> dict[int, Tensor]:
    """Return the local parts of the arrays that processes compute, one each, by rank."""
    coordinates, here = list(itertools.product(*map(range, mesh_sizes(mesh)))), rank_in(mesh)
    windows = {rank: array.windows for rank, array in arrays.items()}

    def elements(holder: int, computing: int) -> int:
        return math.prod(windows[computing][holder].shape) if computing in windows else 0

    def sent(holder: int, computing: int) -> int:
        array = arrays.get(computing)
        first = array and array.sends(coordinates[holder], coordinates[computing])
        return elements(holder, computing) if first else 0

    (like, *_) = (array.local for array in arrays.values())
    locals_ = {rank: array.local.reshape(-1) for rank, array in arrays.items() if sent(here, rank)}
    pieces = deliver(mesh, sent, locals_, like)
    made: dict[int, Tensor] = {}
    if here in arrays:
        whole = like.new_empty(tuple(arrays[here].like.shape))
        for holder, piece in pieces.items():
            window = windows[here][holder]
            whole[window.box] = piece.view(window.shape)
        result = arrays[here].function(whole)
        boxes = ((holder, window.box) for holder, window in enumerate(windows[here]) if not window.is_empty)
        made = {holder: result[box].reshape(-1) for holder, box in boxes}
    back = deliver(mesh, lambda computing, holder: elements(holder, computing), made, like)
    shapes = {rank: of_array[here].shape for rank, of_array in windows.items()}
    return {
        rank: back[rank].view(shape) if rank in back else like.new_empty(shape)
        for rank, shape in shapes.items()
    }


def deliver(
    mesh: Mesh, size: Callable[[int, int], int], sent: Mapping[int, Tensor], like: Tensor
) -> dict[int, Tensor]:
    """Send a tensor to each of some processes in a mesh. Return the received tensors by sender.

    In a mesh with several dimensions a tensor makes one hop along each.

    Args:
        mesh: the mesh. All its processes call this. Ranks are in row-major order of coordinates.
        size: a function from the ranks of sender and receiver to the number of elements, the same in all
            processes.
        sent: the tensors by receiver, in one dimension.
        like: a tensor with the dtype and the device.
    """
    at, here = list(itertools.product(*map(range, mesh_sizes(mesh)))), tuple(coordinate_in(mesh))
    held = {(rank_in(mesh), receiver): x for receiver, x in sent.items()}

    def routes(hops: int) -> list[tuple[int, int]]:
        """Return the tensors in this process after some hops, by coordinates of receiver, then sender."""
        senders = [rank for rank, place in enumerate(at) if place[hops:] == here[hops:]]
        receivers = [rank for rank, place in enumerate(at) if place[:hops] == here[:hops]]
        return [pair for pair in itertools.product(senders, receivers) if size(*pair)]

    for dim, group in enumerate(groups_of(mesh)):
        leaving = sorted(routes(dim), key=lambda route: (at[route[1]][dim], route))
        coming = sorted(routes(dim + 1), key=lambda route: (at[route[0]][dim], route))
        out = torch.cat([like.new_empty(0), *(held[route] for route in leaving)])
        into = like.new_empty(sum(size(*route) for route in coming))
        counts = [[0] * mesh.size(dim) for _ in range(2)]
        for end, listed in ((1, leaving), (0, coming)):
            for route in listed:
                counts[end][at[route[end]][dim]] += size(*route)
        dist.all_to_all_single(into, out, counts[0], counts[1], group=group)
        held = dict(zip(coming, into.split([size(*route) for route in coming]), strict=True))
    return {sender: x for (sender, _), x in held.items()}
