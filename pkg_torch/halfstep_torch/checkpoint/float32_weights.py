"""The weights of an optimizer as precisely as they are known: for export, and for float32 checkpoints.

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
"""By the names of parameters; or a list, in their order, where they have none."""
_LARGEST_HALF = 65504.0


@between_steps
@torch.no_grad()
def float32_params(optimizer: Optimizer) -> Weights:
    """Return the weights in float32, as precisely as they are known.

    p + c under `compensate`; both parts under `split_params`; the copy under `keep_master_params`; otherwise
    the model's weights. Rounds p + c to float32, nothing else.

    Args:
        optimizer: of the parameters.

    Returns:
        Copies, float32 and row-major; the copy of a DTensor is a DTensor with the same placement. They are in
        a dict by the parameters' names or, if the optimizer was given no names, in a list in its order. A
        frozen parameter of another kind, such as uint8, keeps its dtype.

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
    """Set the weights, and the arrays beside them, from float32: to continue from a float32 checkpoint.

    Rounds each weight to its dtype as its storage does. The rest goes to the array beside the weight:
    `compensate` rounds it to bfloat16. `split_params` of 16 bits and bfloat16, and `keep_master_params`, keep
    all of it. If anything is wrong, no weight is set. If it is interrupted while it copies, the optimizer
    refuses to step or to be saved until this call is repeated.

    Moments and steps stay as they are. Under `param_storage="feedback"` and "int8" the first moment still has
    the errors of the old weights: set it to zeros too (`docs/how-to/feedback.md`).

    Args:
        optimizer: of the parameters.
        values: float32 tensors, as `float32_params` returns them; for a DTensor also all of its values.

    Raises:
        TypeError: if it is not an `Optimizer`, or a value not a float32 tensor.
        ValueError: if names or shapes are not those of the parameters, or a value is past the largest float16
            of a float16 parameter.

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
    # By name, or by place.
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
    """Yield (name, or index where there are no names; parameter; plan) of all parameters."""
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
