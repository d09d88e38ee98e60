"""The formats, roundings, storage and bytes of each parameter in an optimizer, and the reasons.

Not every parameter gets the requested format. Small arrays stay in float32, and float32 weights need no
storage.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from halfstep.description import (
    NOT_STORED,
    WEIGHT,
    ArrayDescription,
    Description,
    moment_reason,
    nbytes_of,
)
from halfstep.hyperparameters import Values
from halfstep.rule import declared
from halfstep.storage.formats import Format
from halfstep_torch.distributed.shards import is_sharded, window_here, window_of
from halfstep_torch.engine.kernels.kernel import missing_form
from halfstep_torch.engine.number_places import number_places
from halfstep_torch.engine.plan import Plan
from halfstep_torch.links.link import Link, is_ours
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.sharded.how_stepped import state_placements
from halfstep_torch.storage.state_array import Shape
from halfstep_torch.storage.stored_moment import StoredMoment
from halfstep_torch.weights.weight_rule import NearestWeights, RoundedWeights

Bytes = tuple[int, int]
"""Bytes in all processes, and in this process."""


def describe(optimizer: Optimizer) -> Description:
    """Describe every array of a run, with its format, its rounding, and the reason for both.

    Nothing is changed. The optimizer may be new, because state is described as after the next step. If your
    own rule has no kernel, the reason of the weight names the operation without a generated form. DTensors
    show the bytes in this process beside the total.

    Args:
        optimizer: an optimizer of this package.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(256, 64, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters(), nu_dtype=hs.scaled("ufloat8_e5m3"))
        >>> found = describe(optimizer)
        >>> found.of("weight", "exp_avg_sq").format, found.of("bias", "exp_avg_sq").format
        ('ufloat8_e5m3, blocks of 128', 'float32')
        >>> found.of("bias", "exp_avg_sq").why
        '... 64 elements are fewer than min_size=4096'

    Source: ours.
    """
    optimizer = check_optimizer("describe", optimizer)
    return Description(tuple(row for _, rows in described(optimizer) for row in rows))


def described(optimizer: Optimizer) -> Iterator[tuple[Tensor, list[ArrayDescription]]]:
    """Yield every parameter with the row of its weights and a row for each of its state arrays."""
    links = optimizer.bound_links()
    groups = (i for i, group in enumerate(optimizer.param_groups) for _ in group["params"])
    for i, (name, param, plan) in zip(groups, optimizer.plans(), strict=True):
        yield param, list(_rows(optimizer, links[i], name.replace("/", "."), param, plan))


def array_bytes(optimizer: Optimizer, param: Tensor, plan: Plan) -> dict[str, Bytes]:
    """Return the bytes of each state array of a parameter, none if it is frozen."""
    if is_frozen(optimizer, param):
        return {}
    placed, whole = state_placements(plan, param), tuple(param.shape)
    sizes = {}
    for key, array in plan.arrays.items():
        shape = array.shape(whole)
        here = window_here(shape, param.device_mesh, placed[key]).shape if is_sharded(param) else shape
        itemsize = array.dtype.itemsize
        sizes[key] = nbytes_of(shape, itemsize), nbytes_of(here, itemsize)
    return sizes


def is_frozen(optimizer: Optimizer, param: Tensor) -> bool:
    """Whether a parameter gets no gradient and has no state."""
    return not param.requires_grad and param.grad is None and not optimizer.state.get(param)


def _rows(
    optimizer: Optimizer, links: Sequence[tuple[Link, Values]], name: str, param: Tensor, plan: Plan
) -> Iterator[ArrayDescription]:
    sizes, shape = array_bytes(optimizer, param, plan), tuple(param.shape)
    weight = _weight(optimizer, name, param, plan)
    if missing := _without_form(optimizer, links, param, plan):
        why = f"{weight.why}; plain steps, as there is no generated form of {missing}"
        weight = dataclasses.replace(weight, why=why)
    yield weight
    for rule, index in zip(plan.rules, plan.rule_indices, strict=True) if sizes else ():
        link, h = links[index]
        arrays = set(rule.arrays)
        for moment in rule.moments:
            keys = [key for key in (moment.again or moment).arrays if key in arrays]
            arrays -= set(keys)
            yield _moment(name, shape, moment, _asked_format(link, h, moment.name), plan, sizes, keys)
        for key in sorted(arrays):
            dtype = dtype_name(plan.arrays[key].dtype)
            yield _row(name, key, shape, dtype, "", f"kept by {rule.rule.name}", [sizes[key]])


def _without_form(
    optimizer: Optimizer, links: Sequence[tuple[Link, Values]], param: Tensor, plan: Plan
) -> str:
    """Return the operation for which a user's rule has no kernel, or "" if none is missing or wanted."""
    if optimizer._compile.choice is False or is_frozen(optimizer, param):
        return ""
    for k, places in enumerate(plan.bounds):
        stage = plan.padded_stages[k]
        if not stage.compiles or all(is_ours(type(plan.rules[i].rule)) for i in places):
            continue
        of_stage = (links[plan.rule_indices[i]] for i in places)
        numbers = tuple(_first_numbers(link, h) for link, h in of_stage)
        incoming = torch.float32 if k else param.dtype
        if missing := missing_form(stage, number_places(numbers), incoming, param.device):
            return missing
    return ""


def _first_numbers(link: Link, h: Values) -> Values:
    """Return the numbers of a first step for gradients with norm 1."""
    measured = link.measure(h, lambda exact: torch.ones(2)) if link.measures else None
    return link.step_numbers(h, 1, measured)


def _weight(optimizer: Optimizer, name: str, param: Tensor, plan: Plan) -> ArrayDescription:
    dtype, rule = dtype_name(param.dtype), plan.weights.rule
    rounding, why = "stochastic" if rule.rounds(dtype) else "nearest", rule.name
    if is_frozen(optimizer, param):
        rounding, why = "none", "requires_grad is False"
    elif dtype == "float32":
        rounding, why = "none", f"{dtype} weights pass through"
    elif isinstance(rule, RoundedWeights):
        rounding = "feedback"
    elif isinstance(rule, NearestWeights):
        why = NOT_STORED
    whole = tuple(param.shape)
    sizes = [tuple(nbytes_of(x, param.element_size()) for x in (whole, window_of(param).shape))]
    return _row(name, WEIGHT, whole, dtype, rounding, why, sizes)


def _moment(
    name: str,
    shape: Shape,
    moment: StoredMoment,
    asked: Format | None,
    plan: Plan,
    sizes: Mapping[str, Bytes],
    keys: Sequence[str],
) -> ArrayDescription:
    stored = moment.again or moment
    fmt: Format = stored.format
    array = stored.arrays[stored.key]
    why, as_asked = moment_reason(asked, fmt, array.values_shape(shape), dtype_name(plan.dtype))
    rounding = stored.rounding if fmt.rounds else "none"
    of_keys = [sizes[key] for key in keys]
    return _row(name, moment.key, shape, fmt.text, rounding, why, of_keys, as_asked)


def _row(
    name: str,
    array: str,
    shape: Shape,
    fmt: str,
    rounding: str,
    why: str,
    sizes: Sequence[Sequence[int]],
    as_asked: bool = True,
) -> ArrayDescription:
    total, here = (sum(x) for x in zip((0, 0), *sizes, strict=True))
    per_device = here if here != total else None
    return ArrayDescription(name, array, shape, fmt, rounding, total, why, as_asked, per_device)


def _asked_format(link: Link, h: Values, name: str) -> Format | None:
    """Return the requested format, or None for the default."""
    asked = getattr(link, "format", None)
    if isinstance(asked, Format):
        return asked
    dtype = declared(type(link.rule)).moments[name].dtype
    return getattr(h, dtype) if dtype else None
