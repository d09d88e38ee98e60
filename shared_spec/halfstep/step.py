"""One step of a rule on one array, the same in every framework."""

from collections.abc import Mapping
from typing import Any

from halfstep.arrays import Array
from halfstep.hyperparameters import Values
from halfstep.moments import Moments, StepMoment
from halfstep.numbers import Origin, met_a_number, refusal
from halfstep.op import Op
from halfstep.rule import Rule


def updated(
    rule: Rule, numbers: Values, g: Array, p: Array, op: Op, moments: Mapping[str, StepMoment]
) -> Array:
    """Return a rule's update for an array, or for all arrays if the scope is "all".

    `g` and `p` are float32, and tuples if the scope is "all". `p` is None if the rule reads no weights.
    """
    n = type(numbers)(*(op.wrap(x, Origin.NUMBER) for x in numbers))
    try:
        u = rule.update(_wrapped(op, g), _wrapped(op, p), n, Moments(rule.name, moments), op)
    except TypeError as error:
        if not met_a_number(error):
            raise
        raise TypeError(refusal(rule.name)) from error
    except AttributeError as error:
        if error.obj is not n:
            raise
        raise AttributeError(
            f"{rule.name}: update reads n.{error.name}, which is no number of the rule. Declare it: "
            f"{error.name} = number(...) or decay_rate(...), or return it from `numbers`."
        ) from error
    for moment in moments.values():
        moment.check_rounded()
    if isinstance(g, tuple):
        return tuple(op.returned(x, incoming.shape) for x, incoming in zip(u, g, strict=True))
    return op.returned(u, g.shape)


def _wrapped(op: Op, x: Array) -> Any:  # a Number, a tuple of them, or None
    if isinstance(x, tuple):
        return tuple(_wrapped(op, part) for part in x)
    return None if x is None else op.wrap(x)
