"""A rule is tried on a few numbers when the optimizer is built, before it can spoil a training run."""

from typing import Any

import torch
from torch import Tensor

from halfstep.moments import StepMoment
from halfstep.step import updated
from halfstep_torch.bound_rule import BoundRule
from halfstep_torch.link import Link, ParamInfo
from halfstep_torch.numbers.op import GuardedOp, tensor_numbers

_SMALL = 8
_ELEMENTS = 6


def try_rule(caller: str, link: Link, h: Any, info: ParamInfo) -> None:
    """Raise an error unless a rule's update of a parameter is one that steps can be made of.

    Its `update` is run on a few numbers that protect themselves: it has to compute by operators and `op`, to
    return float32 in the shape of what comes in, to round each moment once, to read nothing that the rule
    does not declare and, where its scope is "elementwise", to give every element the same whatever stands
    beside it.

    Args:
        caller: for messages.
        link: of a user's own rule.
        h: what `read` gave.
        info: of the parameter.
    """
    bound = link.bind(caller, h, info)
    if bound is None:
        return
    numbers = link.step_numbers(h, 1)
    if bound.scope == "parameter":
        _update(bound, numbers, *_few(tuple(max(1, min(size, _SMALL)) for size in info.shape)))
        return
    g, p = _few((_ELEMENTS,))
    together = _update(bound, numbers, g, p)
    halves = zip(g.split(_ELEMENTS // 2), p.split(_ELEMENTS // 2), strict=True)
    apart = torch.cat([_update(bound, numbers, *half) for half in halves])
    if not torch.equal(together.view(torch.int32), apart.view(torch.int32)):
        raise ValueError(
            f"{bound.rule.name}: the update of an element depends on those beside it, and the rule is "
            'elementwise. Give it scope = "parameter".'
        )


def _few(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return updates and weights, all different, of either sign."""
    count = torch.Size(shape).numel()
    g, p = torch.linspace(-1.5, 1, count), torch.linspace(2, -1, count)
    return g.view(shape), p.view(shape)


def _update(bound: BoundRule, numbers: Any, g: Tensor, p: Tensor) -> Tensor:
    """Return the update, checked."""
    rule, shape = bound.rule.name, tuple(g.shape)
    op, moments = GuardedOp(rule), {}
    for stored in sorted(bound.moments, key=lambda stored: bool(stored.unit)):
        zeros = torch.zeros(stored.arrays[stored.key].values_shape(shape))
        unit = moments[stored.unit] if stored.unit else None
        moments[stored.name] = StepMoment(stored.name, zeros, op, unit)
    try:
        return updated(bound.rule, tensor_numbers(numbers, g.device), g, p, op, moments)
    except Exception as error:
        if str(error).startswith(f"{rule}: "):
            raise
        raise ValueError(
            f"{rule}: update fails on an update of shape {shape} ({type(error).__name__}: {error}). "
            "Of its fields it knows the options; numbers are those of n, and state is in m."
        ) from error
