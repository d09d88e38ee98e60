"""Shards of DTensors: the local part of a tensor, and the parts in other processes of the mesh.

torch has no public name for the offset of a shard, so it is computed here as torch documents it. An axis with
n elements over k processes is cut into pieces of ceil(n / k), for one mesh dimension after another.
"""

import functools
import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep_torch.distributed.window import Shape, Window

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as Mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
else:  # a build of torch without distributed has no DTensor
    Mesh = DTensor = Placement = object

Placements = tuple[Placement, ...]
"""Placements of an array along each dimension of a mesh."""

PLAIN = {Tensor, torch.nn.Parameter}
"""Classes of plain tensors, which are neither DTensors nor other subclasses."""


class _Kinds(dict):
    """A cache of whether a class is of DTensors, which a step reads several times for every tensor."""

    def __missing__(self, cls: type) -> bool:
        module = sys.modules.get("torch.distributed.tensor")  # without it there is none
        self[cls] = module is not None and issubclass(cls, module.DTensor)
        return self[cls]


_SHARDED = _Kinds()


def is_sharded(x: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, including a replicated one."""
    return _SHARDED[type(x)]


def local_part(x: Tensor) -> Tensor:
    """Return the local part of a tensor in its own memory, or all of a plain tensor."""
    if not _SHARDED[type(x)]:
        return x
    whole: Any = x  # a DTensor
    if torch.is_grad_enabled():
        with torch.no_grad():
            local = whole.to_local()
    else:
        local = whole.to_local()
    # A collective may still be running.
    return local.wait() if hasattr(local, "__tensor_flatten__") else local


def sharding(x: Array) -> tuple[Mesh, Placements] | None:
    """Return the mesh and the placements of a DTensor, or None for a plain tensor."""
    return (x.device_mesh, tuple(x.placements)) if _SHARDED[type(x)] else None


def mesh_sizes(mesh: Mesh) -> Shape:
    """Return the number of processes along each dimension of a mesh."""
    return tuple(mesh.size(i) for i in range(mesh.ndim))


def counts_here(x: Tensor) -> bool:
    """Whether this process counts its elements, as the first process that has them."""
    if not is_sharded(x):
        return True
    places = zip(x.placements, coordinate_in(x.device_mesh), strict=True)
    return all(place == 0 for placement, place in places if placement.is_replicate())


def window_of(x: Tensor) -> Window:
    """Return the window of a tensor in this process."""
    if (where := sharding(x)) is None:
        return Window.full(tuple(x.shape))
    return window_here(tuple(x.shape), *where)


def window_here(shape: Shape, mesh: Mesh, placements: Placements) -> Window:
    """Return the window of this process in an array of a shape, under placements."""
    return windows(shape, mesh_sizes(mesh), placements)[rank_in(mesh)]


def windows_of_all(x: DTensor, shape: Shape | None = None) -> list[Window]:
    """Return the windows of all processes in a DTensor's mesh, in the same order everywhere.

    With a `shape`, return the windows of an array with this shape and the placements of `x`.
    """
    return windows(tuple(x.shape) if shape is None else shape, mesh_sizes(x.device_mesh), tuple(x.placements))


def rank_in(mesh: Mesh) -> int:
    """Return the rank of this process in a mesh, in row-major order of coordinates."""
    rank = 0
    for size, place in zip(mesh_sizes(mesh), coordinate_in(mesh), strict=True):
        rank = rank * size + place
    return rank


def coordinate_in(mesh: Mesh) -> Sequence[int]:
    """Return the coordinate of this process in a mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # `check_sharding` raises for meshes without this process
    return coordinate


@functools.lru_cache(maxsize=1 << 14)
def windows(shape: Shape, sizes: Shape, placements: Placements) -> list[Window]:
    """Return the windows of an array over a mesh of given sizes, in row-major order of coordinates."""
    cuts = [(axis, _mesh_dims(placements, axis)) for axis in range(len(shape))]
    made = []
    for coordinate in itertools.product(*map(range, sizes)):
        offset, local = [], []
        for axis, dims in cuts:
            start, length = 0, shape[axis]
            for dim in dims:
                piece = -(-length // sizes[dim])
                first = min(piece * coordinate[dim], length)
                start, length = start + first, min(piece, length - first)
            offset.append(start)
            local.append(length)
        made.append(Window(shape, tuple(offset), tuple(local)))
    return made


def _mesh_dims(placements: tuple, axis: int) -> list[int]:
    """Return the mesh dimensions that cut an axis, in the order of their cuts.

    The order is from left to right, except that FSDP over tensor parallelism cuts last, with the first
    dimension.
    """
    dims: list[int] = []
    for dim, placement in reversed(list(enumerate(placements))):
        if _axis(placement) == axis:
            dims.insert(len(dims) if _parts(placement) != 1 else 0, dim)
    return dims


def _parts(placement: Placement) -> int:
    """Return the number of parts into which a strided placement's axis is already cut, else 1."""
    return getattr(placement, "split_factor", 1)


def check_sharding(caller: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless every process has a box of the weights `x`, or all of them."""
    if not is_sharded(x):
        return
    mesh, placements = x.device_mesh, tuple(x.placements)
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{caller}: the weight {name!r} is sharded over a mesh that this process is not in. "
            "Pass the parameters of this process's own stage."
        )
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(
                f"{caller}: the weight {name!r} is placed as {placement}: every process holds a summand of "
                "it, and no step of summands is a step of their sum. Use Shard or Replicate: "
                "weight.redistribute(placements=[...])."
            )
        if not (placement.is_replicate() or hasattr(placement, "dim")):
            raise ValueError(
                f"{caller}: the weight {name!r} is placed as {placement}. Use Shard or Replicate: "
                "weight.redistribute(placements=[...])."
            )
        later = (i for i in range(dim + 1, mesh.ndim) if _axis(placements[i]) == _axis(placement))
        if (parts := _parts(placement)) != 1 and parts != math.prod(map(mesh.size, later)):
            raise ValueError(
                f"{caller}: the weight {name!r} is placed as {placement} without the Shard of the same axis, "
                "so its elements here are not consecutive on that axis. Apply tensor "
                "parallelism and fully_shard to one 2-D mesh, and keep its placements."
            )
    here, wanted = tuple(local_part(x).shape), window_of(x).shape
    if here != wanted:
        raise ValueError(
            f"{caller}: the weight {name!r} of shape {tuple(x.shape)} has the shape {here} here, where its "
            f"placements {placements} on a mesh of shape {mesh_sizes(mesh)} say {wanted}. "
            "Make it by fully_shard or distribute_tensor, or pad the axis to a multiple of the mesh."
        )


def _axis(placement: Placement) -> int | None:
    """Return the axis that a placement cuts. FSDP over tensor parallelism has its own class."""
    return getattr(placement, "dim", None)


def from_local(local: Tensor, like: DTensor, placements: Iterable[Placement], shape: Shape) -> Tensor:
    """Return a DTensor of a global shape from the local part, on the mesh of another DTensor."""
    from torch.distributed.tensor import DTensor

    stride = tuple(itertools.accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()
    return DTensor.from_local(
        local, like.device_mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated(x: DTensor) -> Placements:
    """Return the placements that replicate an array over a DTensor's mesh."""
    from torch.distributed.tensor import Replicate

    return (Replicate(),) * x.device_mesh.ndim


def refuse_shards(caller: str, tensors: Iterable[Tensor], way_out: str) -> None:
    """Raise TypeError if a tensor is a DTensor, because the caller needs whole tensors."""
    if any(map(is_sharded, tensors)):
        raise TypeError(f"{caller}: a parameter is a DTensor, which it does not support. {way_out}")


def check_not_replaced(
    caller: str, named: Mapping[str, Tensor], leaves_of: Callable[[torch.nn.Module], Mapping[str, Tensor]]
) -> None:
    """Raise RuntimeError if `fully_shard` has replaced parameters, given by leaf name.

    torch keeps no link from a parameter to its replacement. So all objects are searched for a sharded model
    with a parameter of the same name. It is called only if no parameter ever had a gradient.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not hasattr(module, "FSDPModule"):
        return
    for model in gc.get_objects():
        if not issubclass(type(model), module.FSDPModule):
            continue
        for leaf, param in leaves_of(model).items():
            if (
                leaf in named
                and named[leaf] is not param
                and is_sharded(param)
                and not is_sharded(named[leaf])
            ):
                raise RuntimeError(
                    f"{caller}: no parameter has a gradient, and {leaf!r} of the model is another than the "
                    "optimizer's: fully_shard has replaced it since. Call fully_shard(model) first, then "
                    f"build {caller}(model.named_parameters())."
                )
