"""State arrays in state dicts, with bytes of the same memory for dtypes that gloo cannot send.

Checkpointers gather state dicts (`full_state_dict=True`), and write into their arrays in place. Codes of
8-bit floats and the extra bits of split weights are uint8 there, and keep their dtype in the optimizer. A
cast of a checkpoint's floats does not change them either.
"""

import collections
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import from_local, is_sharded, local_part
from halfstep_torch.leaves.group_names import StateDict

_MOVED = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64)


def as_bytes(entry: Mapping[str, object]) -> StateDict:
    """Return a parameter's state for a state dict, with a last axis of two bytes for 2-byte codes."""
    entry = dict(entry)
    for key, x in entry.items():
        if isinstance(x, Tensor) and x.dtype not in _MOVED:
            entry[key] = _changed(
                x, _bytes_of, (*x.shape, x.element_size())[: x.dim() + x.element_size() - 1]
            )
    return entry


def from_bytes(entry: Mapping[str, object], dtypes: Mapping[str, torch.dtype]) -> StateDict:
    """Return a parameter's state from a state dict, given the dtypes of its arrays."""
    entry = dict(entry)
    for key, dtype in dtypes.items():
        x = entry.get(key)
        if isinstance(x, Tensor) and x.dtype == torch.uint8 and dtype not in _MOVED:
            shape = tuple(x.shape) if dtype.itemsize == 1 else tuple(x.shape[:-1])
            entry[key] = _changed(x, functools.partial(_values_of, dtype=dtype), shape)
    return entry


def pickled(states: Mapping[Tensor, Mapping[str, object]]) -> StateDict:
    """Return states of parameters for a pickle, because torch cannot unpickle 8-bit floats."""
    entries = {param: entry for param, entry in states.items() if isinstance(param, Tensor)}
    dtypes = {
        param: {key: x.dtype for key, x in entry.items() if isinstance(x, Tensor)}
        for param, entry in entries.items()
    }
    held = {**states, **{param: as_bytes(entry) for param, entry in entries.items()}}
    return {"state": collections.defaultdict(dict, held), "_state_dtypes": dtypes}


def unpickled(fields: StateDict) -> StateDict:
    """Return the fields of a pickle, with the original states."""
    fields = dict(fields)
    for param, dtypes in fields.pop("_state_dtypes", {}).items():
        fields["state"][param] = from_bytes(fields["state"][param], dtypes)
    return fields


def _changed(x: Tensor, change: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Apply a function to a tensor, or to the local part of a DTensor of global `shape`."""
    return from_local(change(local_part(x)), x, x.placements, shape) if is_sharded(x) else change(x)


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x.unsqueeze(-1).view(torch.uint8)


def _values_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1:
        return x.view(dtype)
    if not x.dim() or x.shape[-1] != dtype.itemsize:
        return x  # another form, for which the check of shapes raises
    return x.contiguous().view(dtype).squeeze(-1)
