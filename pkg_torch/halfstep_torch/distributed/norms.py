"""The norm of sharded tensors: one or two collectives for each mesh. Contract: N1, N2."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from halfstep_torch.distributed.collectives import gather, reduce_max, reduce_sum
from halfstep_torch.distributed.shards import DTensor, Mesh, counts_here, is_sharded
from halfstep_torch.numbers.global_norm import (
    PLAIN_SUMS,
    Sums,
    global_norms,
    largest_pattern,
    roots_of,
    sum_of_squares,
)
from halfstep_torch.numbers.norms import in_range, norms, norms_of_parts
from halfstep_torch.numbers.op import BareOperand, InPlaceOp, TorchOp


def norms_of_shards(
    tensors: Sequence[Tensor], owners: Sequence[Tensor], *, exact: bool = False, sums: Sums = PLAIN_SUMS
) -> Tensor:
    """Return the norm of all elements of all tensors, and of 2^-64 times them, equal in all processes.

    `tensors` are in this process, and `owners` are their parameters. A DTensor has a shard there, and a plain
    tensor all elements. An element in several processes counts once. `sums` have the bits of `PLAIN_SUMS`.

    With `exact` the result has the bits of `global_norm` on the whole tensors, by two collectives for all
    tensors of a mesh (the largest magnitude, then the sum of integers). Otherwise it is the norm of the
    processes' norms, in the same order everywhere, by one collective. It is then within N1's bound of the
    norm in one process.
    """
    by_mesh: dict[Mesh | None, list[Tensor]] = {}
    for i, owner in enumerate(owners):
        mesh = owner.device_mesh if is_sharded(owner) else None
        counted = counts_here(owner)
        by_mesh.setdefault(mesh, []).extend([tensors[i]] if counted else [])
    meshes = [mesh for mesh in by_mesh if mesh is not None]
    if not meshes:
        return global_norms(tensors, exact=exact, sums=sums)
    device = tensors[0].device
    if not exact:
        parts = [global_norms(of_mesh, sums=sums).to(device).view(1, 2) for of_mesh in by_mesh.values()]
        gathered = [x if mesh is None else gather(x, mesh) for x, mesh in zip(parts, by_mesh, strict=True)]
        return norms_of_parts(torch.cat(gathered))
    largest = torch.stack([sums.largest(of_mesh, device) for of_mesh in by_mesh.values()])
    for i, mesh in enumerate(by_mesh):
        if mesh is not None:
            reduce_max(largest[i : i + 1], mesh)
    largest = largest.amax()
    squares = torch.stack([sums.squares(of_mesh, largest) for of_mesh in by_mesh.values()])
    for i, mesh in enumerate(by_mesh):
        if mesh is not None:
            reduce_sum(squares[i], mesh)
    return roots_of(squares.sum(0), largest)


@dataclasses.dataclass(eq=False)
class Share:
    """The share of this process in the norm of a sharded tensor.

    Attributes:
        kind: "norm", or for an exact norm "largest" (the largest pattern) and then "sum" (of squares).
        key: the indices of the parameter in the step and of the norm in the update.
        mesh: the mesh over which the parameter is sharded.
        value: the value for local elements, and for all elements after the exchange.
    """

    kind: str
    key: tuple[int, int]
    mesh: Mesh
    value: Tensor


class SharedNorms(InPlaceOp):
    """Operations of a rule on a sharded parameter.

    An `update` with norms is run several times, each time after `begin`. If a run leaves `shares`, they must
    be exchanged, and its result is not used.
    """

    def __init__(self, owner: DTensor, index: int) -> None:
        self._owner, self._index, self._known = owner, index, {}
        self._counts = counts_here(owner)

    def begin(self) -> None:
        """Start another run."""
        self._asked = 0
        self.shares: list[Share] = []

    def norms_of(self, x: Tensor, exact: bool) -> Tensor:
        """Return the norms of the whole array, given its local part x, or zeros until they are known."""
        key, here = (self._index, self._asked), [x] if self._counts else []
        self._asked += 1
        before: Share | None = self._known.get(key)
        if before and before.kind == "norm":
            return before.value
        if before and before.kind == "sum":
            return roots_of(before.value, self._known[key, "largest"])
        if before:
            self._known[key, "largest"] = before.value
            kind, value = "sum", sum_of_squares(here, before.value)
        elif exact:
            kind, value = "largest", largest_pattern(here, x.device)
        else:
            kind, value = "norm", norms(x if self._counts else x[:0])
        self._known[key] = share = Share(kind, key, self._owner.device_mesh, value)
        self.shares.append(share)
        return torch.zeros(2, dtype=torch.float32, device=x.device)

    def scaled(self, x: Tensor, ratio: BareOperand, scale: BareOperand = 1.0) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ratio (scale x), in the memory of x, once all norms are known."""
        return x if self.shares else super().scaled(x, ratio, scale)


def exchange(shares: Sequence[Share]) -> None:
    """Add up the shares of all processes, by one collective for each kind along a mesh."""
    together: dict[tuple[Mesh, str], dict[tuple[int, int], list[Share]]] = {}
    for share in sorted(shares, key=lambda share: share.key):
        together.setdefault((share.mesh, share.kind), {}).setdefault(share.key, []).append(share)
    for (mesh, kind), by_key in together.items():
        for parts, value in zip(by_key.values(), _of_all(kind, mesh, list(by_key.values())), strict=True):
            for share in parts:
                share.value = value


def _of_all(kind: str, mesh: Mesh, shares: list[list[Share]]) -> Tensor:
    """Return the totals over processes, given this process's shares in each value."""
    parts = [torch.stack([share.value for share in of_key]) for of_key in shares]
    if kind == "largest":
        return reduce_max(torch.stack([of_key.amax() for of_key in parts]), mesh)
    if kind == "sum":
        return reduce_sum(torch.stack([of_key.sum(0) for of_key in parts]), mesh)
    here = torch.stack([norms_of_parts(of_key) for of_key in parts])
    gathered = gather(here, mesh).view(-1, *here.shape)
    return torch.stack([norms_of_parts(of_key) for of_key in gathered.unbind(1)])


def clip(updates: Iterable[Tensor], norms: Tensor, max_norm: float | Tensor) -> Iterator[Tensor]:
    """Yield updates in float32, times max_norm / norm if the norm is above max_norm (contract N3)."""
    of_device = {}
    for u in updates:
        if u.device not in of_device:
            of_device[u.device] = clip_factors(norms.to(u.device), max_norm)
        yield TorchOp.scaled(u.to(torch.float32), *of_device[u.device])


def clip_factors(norms: Tensor, max_norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the two factors of updates, quotient and scale, or 1 and 1, which keep every bit."""
    norm, scale = in_range(norms)
    passes = norms[0] <= max_norm
    return torch.where(passes, 1.0, max_norm / norm), torch.where(passes, 1.0, scale)
