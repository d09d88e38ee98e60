"""The weights of an optimizer in full precision, for export and for float32 checkpoints.

Contract: section P.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep_torch.distributed.placement import beside, placed_copy
from halfstep_torch.distributed.shards import from_local, is_sharded, local_part, sharding
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.signals import between_steps
from halfstep_torch.leaves.checks import HELD_BY_FLOAT32, check_has_numbers
from halfstep_torch.leaves.group_names import given_names
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.sharded.slots import new_state

Weights: TypeAlias = dict[str, Tensor] | Any
"""Weights by parameter name, or in a list if the parameters have no names."""
_LARGEST_HALF = 65504.0


@between_steps
@torch.no_grad()
def float32_params(optimizer: Optimizer) -> Weights:
    """Return the weights in float32, with the extra bits that the optimizer stores.

    The result is p + c with `compensate`, both parts with `split_params`, the copy with `keep_master_params`,
    and otherwise the model's weights. Only p + c is rounded, to float32.

    Args:
        optimizer: an optimizer of this package.

    Returns:
        Float32 row-major copies. The copy of a DTensor is a DTensor with the same placement. They are in a
        dict by parameter name or, if the optimizer was built without names, in a list in its order. A frozen
        parameter with another kind of dtype, such as uint8, keeps its dtype.

    Raises:
        TypeError: if it is not an `Optimizer`.
        RuntimeError: if the last load failed while it copied.

    Example:
        >>> import halfstep_torch as hs
        >>> model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters(), param_storage="split16")
        >>> float32_params(optimizer)["bias"].dtype
        torch.float32

    Source: contract P4, P5.
    """
    optimizer = check_optimizer("float32_params", optimizer)
    optimizer.check_loaded()
    values: dict[str | int, Tensor] = {}
    for key, param, plan in _parameters(optimizer):
        state, p32 = optimizer.state.get(param, {}), local_part(param).detach().contiguous()
        p32 = p32.to(torch.float32) if param.dtype in HELD_BY_FLOAT32 else p32
        arrays = (
            {name: beside(state[name], param).to(param.device) for name in plan.weights.arrays}
            if "step" in state
            else {}
        )
        known = plan.weights.join(p32, arrays) if "step" in state else p32
        value = known.detach().clone(memory_format=torch.contiguous_format)
        values[key] = (
            from_local(value, param, param.placements, tuple(param.shape)) if is_sharded(param) else value
        )
    return list(values.values()) if all(isinstance(key, int) for key in values) else values


@between_steps
@torch.no_grad()
def set_float32_params(optimizer: Optimizer, values: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
    """Set the weights and the arrays beside them from float32, to continue from a float32 checkpoint.

    Each weight is rounded to its dtype as in its storage, and the array beside it gets the rest. `compensate`
    rounds the rest to bfloat16. `split_params` with 16 bits and bfloat16 weights, and `keep_master_params`,
    keep all of it. If there is an error, no weight is set. If the call is interrupted while it copies, `step`
    and `state_dict` raise RuntimeError until it is repeated.

    Moments and step counts do not change. With `param_storage="feedback"` and "int8" the first moment still
    has the errors of the old weights, so set it to zeros too (`docs/how-to/feedback.md`).

    Args:
        optimizer: an optimizer of this package.
        values: float32 tensors as from `float32_params`. For a DTensor, its whole array is allowed too.

    Raises:
        TypeError: if it is not an `Optimizer`, or a value is not a float32 tensor.
        ValueError: if names or shapes differ from the parameters', or a value overflows a float16 parameter.

    Example:
        >>> import halfstep_torch as hs
        >>> w = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        >>> optimizer = hs.AdamW([("w", w)], param_storage="split16")
        >>> set_float32_params(optimizer, {"w": torch.tensor([0.1])})
        >>> w.item(), float32_params(optimizer)["w"].item()
        (0.10009765625, 0.10000000149011612)

    Source: contract P1, P4, P5.
    """
    caller = "set_float32_params"
    optimizer = check_optimizer(caller, optimizer)
    parameters = list(_parameters(optimizer))
    # By name, or by index.
    given: dict[Any, Tensor] = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    _check_keys(caller, [key for key, _, _ in parameters], list(given))
    for key, param, _ in parameters:
        _check_value(caller, key, param, given[key])
    was_half = optimizer._half_loaded
    optimizer._half_loaded = was_half or caller
    for key, param, plan in parameters:
        placed = sharding(param)
        w = local_part(placed_copy(given[key].detach(), param, placed and placed[1]))
        p32, arrays = plan.weights.store(w) if param.dtype in HELD_BY_FLOAT32 else (w, {})
        if arrays and "step" not in optimizer.state[param]:
            optimizer.state[param].update(optimizer._home.placed(param, plan, new_state(param, plan)))
        for name, array in arrays.items():
            state = optimizer.state[param][name]
            if is_sharded(param):
                whole = from_local(array.to(state.dtype), param, param.placements, tuple(param.shape))
                array = local_part(placed_copy(whole, param, tuple(state.placements)))
            local_part(state).copy_(array)
        local_part(param).copy_(p32)
    optimizer._half_loaded = None if was_half == caller else was_half


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str | int, Tensor, Plan]]:
    """Yield (name or, without names, index; parameter; plan) for all parameters."""
    named = zip(given_names(optimizer.param_groups), optimizer.plans(), strict=True)
    for index, (name, (_, param, plan)) in enumerate(named):
        yield (index if name is None else name), param, plan


def _check_keys(caller: str, ours: list, given: list) -> None:
    missing = [key for key in ours if key not in given]
    unknown = [key for key in given if key not in ours]
    if missing or unknown:
        problem = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not a parameter"
        raise ValueError(f"{caller}: {problem}. Pass what float32_params returns.")


def _check_value(caller: str, key: str | int, param: Tensor, value: object) -> None:
    dtype = torch.float32 if param.dtype in HELD_BY_FLOAT32 else param.dtype
    if not isinstance(value, Tensor) or value.dtype != dtype:
        given = dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        way_out = "value.float()" if dtype == torch.float32 else f"value.to({dtype})"
        raise TypeError(
            f"{caller}: {key!r} is {given}; values are {dtype_name(dtype)} tensors. Pass {way_out}."
        )
    if value.shape != param.shape:
        raise ValueError(
            f"{caller}: {key!r} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}. "
            "Pass the values of this model."
        )
    check_has_numbers(caller, repr(key), value, param)
    here = local_part(value).reshape(-1)
    past = here[here.abs() > _LARGEST_HALF] if param.dtype == torch.float16 else here[:0]
    if past.numel():
        raise ValueError(
            f"{caller}: {key!r} has {past.view(-1)[0].item()}, past the largest float16, 65504. "
            "Use bfloat16 params, or clip."
        )
