"""The placement of a sharded parameter's state arrays, beside its elements or whole in every process.

It depends only on shapes, mesh and placements, so all processes decide alike.
"""

import math

import torch
from torch import Tensor

from halfstep.storage.blocks import block_layout
from halfstep_torch.distributed.collectives import gather_whole
from halfstep_torch.distributed.shards import (
    DTensor,
    Placements,
    from_local,
    is_sharded,
    local_part,
    sharding,
    window_here,
    window_of,
    windows_of_all,
)
from halfstep_torch.distributed.window import Window
from halfstep_torch.storage.state_array import StateArray


def array_placements(spec: StateArray, param: DTensor) -> Placements | None:
    """Return the placements of a state array beside the shards of the weights, or None.

    Such placements exist if no border of a shard cuts a block or a byte of two codes, and if the array's
    shards, as torch cuts them, are the blocks of the weights' shards.
    """
    placements, shape = tuple(param.placements), tuple(param.shape)
    if spec.shape_of is not None and spec.values_shape(shape) != shape:
        return None
    fmt = spec.scale_of or spec.packed_of
    if fmt is None or fmt.blocks is None:
        return placements
    leading, run, size = block_layout(shape, fmt.block_size)
    unit = max(1, min(size, run)) if spec.scale_of else 2
    if any(getattr(placement, "dim", 0) > len(leading) for placement in placements):
        return None
    per_entry = unit if spec.scale_of else 2
    stored = windows_of_all(param, spec.shape(shape))
    fits = (
        _fits(window, entries, len(leading), run, unit, per_entry)
        for window, entries in zip(windows_of_all(param), stored, strict=True)
    )
    return placements if all(fits) else None


def _fits(window: Window, entries: Window, axis: int, run: int, unit: int, per_entry: int) -> bool:
    """Whether the entries belong to the window, which has whole units of every run from `axis` on."""
    if window.is_empty:
        return entries.is_empty
    if window.shape[axis + 1 :] != window.whole[axis + 1 :]:
        return False
    start, stop = 0, run
    if axis < len(window.whole):
        rest = math.prod(window.whole[axis + 1 :])
        start = window.offset[axis] * rest
        stop = start + window.shape[axis] * rest
    if start % unit or start % per_entry or (stop % unit and stop != run):
        return False
    first, last = start // per_entry, -(-stop // per_entry)
    return (entries.offset[axis], entries.shape[axis]) == (first, last - first) if entries.whole else True


def new_array(spec: StateArray, param: DTensor, placements: Placements) -> Tensor:
    """Return the initial state array of a sharded parameter, as a DTensor with these placements."""
    shape = spec.shape(tuple(param.shape))
    if spec.copied_as is not None:
        here = window_here(shape, param.device_mesh, placements)
        local = spec.new(gather_whole([param])[0])[here.box].clone()
    elif spec.copies_weights:
        weights = (
            local_part(param).detach() if placements == tuple(param.placements) else gather_whole([param])[0]
        )
        local = weights.to(spec.dtype, memory_format=torch.contiguous_format, copy=True)
    else:
        window = window_here(shape, param.device_mesh, placements)
        local = torch.full(window.shape, spec.start, dtype=spec.dtype, device=param.device)
    return from_local(local, param, placements, shape)


@torch.no_grad()
def placed_copy(array: Tensor, param: Tensor, placements: Placements | None) -> Tensor:
    """Return a copy of a state array on the device of its parameter, with the given placements.

    `array` is a plain tensor with all elements, or a DTensor with any placements. `placements` are the
    placements of the copy, or None for a plain parameter.
    """
    where = sharding(param)
    if is_sharded(array) and sharding(array) != (where and (where[0], placements)):
        array = gather_whole([array])[0]  # as bytes, because every backend can send bytes
    local, shape = local_part(array), tuple(array.shape)
    if where and placements is not None and not is_sharded(array):
        local = local[window_here(shape, where[0], placements).box]
    copy = local.to(param.device, copy=True, memory_format=torch.contiguous_format)
    if placements is None or not is_sharded(param):
        return copy
    return from_local(copy, param, placements, shape)


def beside(array: Tensor, param: Tensor) -> Tensor:
    """Return the elements of a state array at this process's elements of its parameter."""
    if not is_sharded(array) or sharding(array) == sharding(param):
        return local_part(array)
    return local_part(array)[window_of(param).box]
