"""Checks of parameters, gradients and state before a step."""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, Sized, ValuesView
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import (
    Mesh,
    Placements,
    check_sharding,
    is_sharded,
    local_part,
    mesh_sizes,
    sharding,
)
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.storage.base_codes import NAN_SCALE
from halfstep_torch.storage.state_array import StateArray

LAST_STEP = 2**31 - 1
"""Last count of steps (contract W5)."""
_PLAIN = (Tensor, torch.nn.Parameter)
HELD_BY_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that can be stepped. Weights with other dtypes may be frozen."""


def check_weight(caller: str, name: str, param: Tensor) -> None:
    """Raise TypeError or ValueError unless weights of this kind can be stepped in place."""
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"{caller}: the weight {name!r} has no shape yet. Run the model once before it has an optimizer."
        )
    if not _is_plain(param) and not is_sharded(param):
        raise TypeError(f"{caller}: the weight {name!r} is {_kind(param)}. Pass plain dense tensors.")
    check_sharding(caller, name, param)
    if param.is_complex():
        raise TypeError(
            f"{caller}: the weight {name!r} is {dtype_name(param.dtype)}; weights are real. Make a parameter "
            "of its parts, torch.view_as_real(weight), and torch.view_as_complex(parameter) in the model."
        )
    if param.dtype not in HELD_BY_FLOAT32:
        raise TypeError(
            f"{caller}: the weight {name!r} is {dtype_name(param.dtype)}; "
            "weights are float32, bfloat16 or float16. Cast it."
        )
    repeated = any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True))
    if repeated and param.numel():
        raise ValueError(f"{caller}: elements of the weight {name!r} share memory. Pass a clone of it.")


def check_grad(caller: str, name: str, param: Tensor) -> None:
    """Raise TypeError or ValueError unless the gradient of `param` can be used."""
    grad = param.grad
    assert grad is not None
    # A wrapper may have replaced the groups' tensors since they were added.
    for what, tensor in (("weight", param), ("gradient of", grad)):
        if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
            raise TypeError(f"{caller}: the {what} {name!r} is {_kind(tensor)}. Pass plain dense tensors.")
    if grad.layout != torch.strided:
        raise TypeError(
            f"{caller}: the gradient of {name!r} is sparse; gradients are dense. "
            "Use sparse=False in the layer."
        )
    if grad.dtype not in HELD_BY_FLOAT32:
        raise TypeError(
            f"{caller}: the gradient of {name!r} is {dtype_name(grad.dtype)}; "
            "gradients are float32, bfloat16 or float16. Cast it."
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"{caller}: the gradient of {name!r} has shape {tuple(grad.shape)} on {grad.device}, "
            f"its weight {tuple(param.shape)} on {param.device}. Run backward again."
        )
    where, grad_where = sharding(param), sharding(grad)
    if where is grad_where is None:
        return
    mesh, grad_mesh = where and where[0], grad_where and grad_where[0]
    if mesh != grad_mesh:
        raise TypeError(
            f"{caller}: the weight {name!r} is {_where(mesh)}, its gradient {_where(grad_mesh)}. "
            "Run backward again, with the parameters that the optimizer has."
        )


def check_state_array(
    caller: str,
    name: str,
    key: str,
    spec: StateArray,
    array: Tensor,
    param: Tensor,
    placements: Placements | None = None,
    home: torch.device | None = None,
) -> None:
    """Raise TypeError or ValueError unless a state array fits its parameter, format and placement."""
    home = param.device if home is None else home
    if is_sharded(array) or is_sharded(param):
        _check_placed(caller, name, key, array, param, placements)
    elif not isinstance(array, Tensor) or not _is_plain(array):
        kind = _kind(array) if isinstance(array, Tensor) else f"a {type(array).__name__}"
        raise TypeError(
            f"{caller}: {key} of {name!r} is {kind}. State arrays are plain dense tensors: "
            "load them by load_state_dict."
        )
    if array.dtype != spec.dtype:
        raise ValueError(
            f"{caller}: {key} of {name!r} is stored in {dtype_name(array.dtype)}, its group says "
            f"{dtype_name(spec.dtype)} for a {dtype_name(param.dtype)} weight. "
            "Cast the model, and set formats, before the first step."
        )
    if array.shape != spec.shape(param.shape) or array.device != home:
        raise ValueError(
            f"{caller}: {key} of {name!r} has shape {tuple(array.shape)} on {array.device}, "
            f"its weight {tuple(param.shape)} on {home}{_cut(spec)}. "
            "Make the optimizer once the model has its shape and device."
        )
    if not local_part(array).is_contiguous():
        raise ValueError(
            f"{caller}: {key} of {name!r} is not row-major, as state is, whatever the layout of its weight. "
            "Load it by load_state_dict, or write array.contiguous()."
        )


def _check_placed(
    caller: str, name: str, key: str, array: Tensor, param: Tensor, placements: Placements | None
) -> None:
    """Raise TypeError unless a state array has the mesh of its parameter and the right placements."""
    where, mesh = sharding(array), (sharding(param) or (None,))[0]
    if where == (mesh, placements):
        return
    is_now = _where(*where) if where else _where(None)
    raise TypeError(
        f"{caller}: {key} of {name!r} is {is_now}, and would be {_where(mesh, placements)}. "
        "Load it by load_state_dict, once the model is sharded as it is trained."
    )


def _where(mesh: Mesh | None, placements: Placements | None = None) -> str:
    """Return the place of a tensor in words."""
    if mesh is None:
        return "a plain tensor"
    placed = "" if placements is None else f" as {', '.join(map(str, placements))}"
    return f"a DTensor over a mesh of shape {mesh_sizes(mesh)}{placed}"


def check_count(caller: str, name: str, count: object) -> None:
    """Raise TypeError unless a count is a tensor that steps can increment in place, ValueError if below 0."""
    if not isinstance(count, Tensor) or count.dtype != torch.int64 or count.dim():
        kind = f"{dtype_name(count.dtype)}{list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise TypeError(
            f"{caller}: the step of {name!r} is {kind}, not a tensor int64[]. "
            "Load state by load_state_dict, or write torch.tensor(int(step))."
        )
    if count < 0:
        raise ValueError(
            f"{caller}: the step of {name!r} is {int(count)}, and counts start at 0. Write the number of "
            "steps taken, or clear the state to start again."
        )


def check_has_numbers(caller: str, what: str, array: Tensor, param: Tensor) -> None:
    """Raise ValueError for an array on the meta device, unless its parameter is there too."""
    if local_part(array).is_meta and not param.is_meta:
        raise ValueError(
            f"{caller}: {what} is on the device meta, without numbers. Load the file without "
            "map_location='meta'."
        )


def check_leftovers(
    caller: str, name: str, arrays: Mapping[str, StateArray], state: Mapping[str, Tensor]
) -> None:
    """Raise ValueError if a state holds arrays that belong to weights of another dtype."""
    for key in ("compensation", "extra_bits", "master"):
        if key in state and key not in arrays:
            raise ValueError(
                f"{caller}: the state of {name!r} holds {key}, which belongs to 16-bit weights, and the "
                "weight has another dtype now. Build a new optimizer once the model has its dtype; before "
                "the change float32_params gives all bits."
            )


def check_scale_bytes(
    caller: str, name: str, key: str, spec: StateArray, array: Tensor, way_out: str
) -> None:
    """Raise ValueError if encoding never writes one of the scale bytes."""
    fmt = spec.scale_of
    if fmt is None or not array.numel():
        return
    lowest, highest = fmt.codes.scale_range
    wrong = (array < lowest) | (array > highest)
    if fmt.codes.nan_in_scale:
        wrong &= array != NAN_SCALE
    if wrong.any():
        raise ValueError(
            f"{caller}: {key} of {name!r} holds the byte {int(array[wrong][0])}; scales of {fmt.dtype} are "
            f"{lowest} to {highest}{f', or {NAN_SCALE}' if fmt.codes.nan_in_scale else ''}. {way_out}"
        )


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has its own memory, unlike a wrapper subclass such as DTensor."""
    return not hasattr(x, "__tensor_flatten__") and x.layout == torch.strided


def _kind(x: Tensor) -> str:
    return f"a {type(x).__name__}" if x.layout == torch.strided else "sparse"


def _cut(spec: StateArray) -> str:
    return f" in blocks of {spec.scale_of.block_size}" if spec.scale_of else ""


def check_params(caller: str, params: Any) -> Any:  # parameters in any form of torch
    """Return parameters, as a list if they can be read only once; refuse others with the way out."""
    way_out = "Pass model.named_parameters()."
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"{caller}: the parameters are a module, {type(params).__name__}. {way_out}")
    if isinstance(params, Mapping):
        raise TypeError(f"{caller}: the parameters are a dict, such as a state dict. {way_out}")
    if isinstance(params, Tensor):
        raise TypeError(f'{caller}: the parameters are a tensor. Pass a list, such as [("w", tensor)].')
    if callable(params) and not isinstance(params, Iterable):
        name = getattr(params, "__name__", type(params).__name__)
        raise TypeError(f"{caller}: the parameters are a function, {name}. Call model.named_parameters().")
    if isinstance(params, ItemsView | ValuesView):
        _check_live(caller, params, way_out)
    once = isinstance(params, Iterator)
    params = list(params) if isinstance(params, Iterator) else params
    if isinstance(params, Sized) and not len(params):
        why = "the generator is empty, as after its first use" if once else "there are no parameters"
        raise ValueError(f"{caller}: {why}. {way_out}")
    if isinstance(params, Sequence):
        named = {isinstance(x, tuple) for x in params if isinstance(x, tuple | Tensor)}
        if len(named) > 1:
            raise ValueError(
                f"{caller}: some parameters have names, and others none. Pass pairs (name, parameter) alone, "
                'as in [*model.named_parameters(), ("log_alpha", log_alpha)].'
            )
    return params


def _check_live(caller: str, params: ItemsView | ValuesView, way_out: str) -> None:
    """Refuse tensors of a state dict: no gradient reaches them."""
    tensors = [x[1] if isinstance(x, tuple) else x for x in params]
    if tensors and not any(
        isinstance(x, torch.nn.Parameter) or getattr(x, "requires_grad", 1) for x in tensors
    ):
        raise ValueError(f"{caller}: no gradient reaches the values of a state dict. {way_out}")
