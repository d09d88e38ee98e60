"""A rule is tried on a few numbers when the optimizer is built, before it can spoil a training run."""

from typing import Any

import torch
from torch import Tensor

from halfstep_torch.bound_rule import BoundRule, Moments
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.rule import ParamInfo, Rule

_SMALL = 8
_ELEMENTS = 6


class _TriedMoment:
    """A moment that is kept as it is, and looks at what it is given."""

    def __init__(self, rule: str, key: str, value: Tensor, unit: "_TriedMoment | None"):
        self._rule, self._key, self._unit = rule, key, unit
        self.value, self.rounded = value, False

    def round(self, x: Any) -> Tensor:
        """Return x, if it may be stored."""
        if self.rounded:
            raise ValueError(f"{self._rule}: update rounds {self._key} twice in a step. Round it once.")
        if self._unit is not None and not self._unit.rounded:
            unit = self._unit._key
            raise ValueError(
                f"{self._rule}: {self._key} is kept in units of the root of {unit}. Round {unit} first."
            )
        _check_array(self._rule, f"what is stored as {self._key}", x, self.value)
        self.rounded = True
        return x


def check_rule(caller: str, rule: Rule, h: Any, info: ParamInfo) -> None:
    """Raise ValueError unless a rule's update of a parameter is one that steps can be made of.

    Its `update` is run on a few numbers: it has to return float32 in the shape of what comes in, to round
    each moment once, to read nothing that the rule does not declare and, where its scope is "elementwise",
    to give every element the same whatever stands beside it.

    Args:
        caller: for messages.
        rule: a user's own.
        h: what `read` gave.
        info: of the parameter.
    """
    bound = rule.bind(caller, h, info)
    if bound is None:
        return
    numbers = rule.step_numbers(h, 1)
    if bound.scope == "parameter":
        _update(bound, numbers, *_few(tuple(max(1, min(size, _SMALL)) for size in info.shape)))
        return
    g, p = _few((_ELEMENTS,))
    together = _update(bound, numbers, g, p)
    halves = zip(g.split(_ELEMENTS // 2), p.split(_ELEMENTS // 2), strict=True)
    apart = torch.cat([_update(bound, numbers, *half) for half in halves])
    if not torch.equal(together.view(torch.int32), apart.view(torch.int32)):
        raise ValueError(
            f"{rule.name}: the update of an element depends on those beside it, and the rule is elementwise. "
            'Give it scope = "parameter".'
        )


def _few(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return updates and weights, all different, of either sign."""
    count = torch.Size(shape).numel()
    g, p = torch.linspace(-1.5, 1, count), torch.linspace(2, -1, count)
    return g.view(shape), p.view(shape)


def _update(bound: BoundRule, numbers: Any, g: Tensor, p: Tensor) -> Tensor:
    """Return the update, checked."""
    rule, moments = bound.rule.name, {}
    for one in sorted(bound.moments, key=lambda one: bool(one.unit)):
        shape_of = one.arrays[one.key].shape_of
        shape = tuple(g.shape) if shape_of is None else tuple(shape_of(tuple(g.shape)))
        moments[one.key] = _TriedMoment(
            rule, one.key, torch.zeros(shape), moments[one.unit] if one.unit else None
        )
    try:
        u = bound.rule.update(g, p, numbers, Moments(rule, moments))
    except Exception as error:
        raise ValueError(
            f"{rule}: update fails on an update of shape {tuple(g.shape)} ({type(error).__name__}: {error}). "
            "Of its fields it knows the options; numbers are those of n, and state is in moments."
        ) from error
    _check_array(rule, "what update returns", u, g)
    for key, one in moments.items():
        if not one.rounded:
            raise ValueError(
                f"{rule}: update never rounds {key}, which so would stay zero. "
                f"Call moments.{key}.round(...) once, or do not declare it."
            )
    return u


def _check_array(rule: str, what: str, x: Any, like: Tensor) -> None:
    """Raise ValueError unless x is a float32 tensor in the shape of another."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.shape != like.shape:
        given = f"{dtype_name(x.dtype)}{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{rule}: {what} is {given}; it is float32{tuple(like.shape)} here. Keep shape and dtype."
        )
