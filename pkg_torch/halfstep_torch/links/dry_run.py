"""A trial of a rule on a few numbers, when the optimizer is built."""

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.moments import Moments, StepMoment
from halfstep.step import updated
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.link import Link, ParamInfo
from halfstep_torch.numbers.op import STEP_OPS, GuardedOp, tensor_numbers

_SMALL = 8
_ELEMENTS = 6


def try_rule(caller: str, link: Link, h: Values, info: ParamInfo) -> None:
    """Raise an error unless a rule's update of a parameter is usable.

    Its `update` runs on a few numbers that support only operators and `op`. It must return float32 in the
    shape of the incoming update, round each moment once, and read only declared values. If the scope is
    "elementwise", the result of an element must not depend on other elements.
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
    """Return distinct updates and weights of both signs."""
    count = torch.Size(shape).numel()
    g, p = torch.linspace(-1.5, 1, count), torch.linspace(2, -1, count)
    return g.view(shape), p.view(shape)


def _update(bound: BoundRule, numbers: Values, g: Tensor, p: Tensor) -> Tensor:
    """Return the update, checked on guarded numbers and then on bare tensors."""
    rule, shape = bound.rule.name, tuple(g.shape)
    op, moments, values = GuardedOp(rule), {}, {}
    for stored in sorted(bound.moments, key=lambda stored: bool(stored.unit)):
        values[stored.name] = torch.zeros(stored.arrays[stored.key].values_shape(shape))
        unit = moments[stored.unit] if stored.unit else None
        moments[stored.name] = StepMoment(stored.name, values[stored.name], op, unit)
    tensors = tensor_numbers(numbers, g.device)
    try:
        u = updated(bound.rule, tensors, g, p, op, moments)
        bare, *_ = bare_update(bound, numbers, g, p, values)
    except Exception as error:
        if str(error).startswith(f"{rule}: "):
            raise
        raise ValueError(
            f"{rule}: update fails on an update of shape {shape} ({type(error).__name__}: {error}). "
            "It may read options from its own fields, numbers from n, and state from m."
        ) from error
    if not bool(((u == bare) | (u.isnan() & bare.isnan())).all()):
        raise ValueError(
            f"{rule}: update gives another result on the bare tensors of a step. "
            "Use operators and op alone, whatever the type of a number."
        )
    return u


def bare_update(
    bound: BoundRule, numbers: Values, g: Tensor, p: Tensor, values: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Return the update of a step with float32 moments, as in the engine, and the new moments."""
    moments = {name: _BareMoment(x) for name, x in values.items()}
    if bound.tensor_numbers:
        numbers = tensor_numbers(numbers, g.device)
    # A rule of scope "parameter" may write into the incoming update.
    u = bound.rule.update(g.clone(), p, numbers, Moments(bound.rule.name, moments), STEP_OPS[bound.scope])
    return u, *(moment.rounded for moment in moments.values())


class _BareMoment:
    """A float32 moment of a step on bare tensors."""

    has_inverse_root = False

    def __init__(self, value: Tensor) -> None:
        self.value, self.rounded = value, value

    def round(self, x: Tensor) -> Tensor:
        """Return x, and keep it."""
        self.rounded = x
        return x
