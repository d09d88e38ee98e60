"""The learning rate. Contract: section D."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfstep.hyperparameters import check_nonnegative
from halfstep.rule import Rule, number, option
from halfstep_torch.link import Link
from halfstep_torch.numbers.hyperparameters import nonnegative
from halfstep_torch.numbers.schedules import Schedule

LEARNING_RATE = functools.partial(
    number,
    schedule=True,
    torch="lr",
    check=functools.partial(check_nonnegative, hint="Use a number >= 0, or maximize=True to ascend."),
)
"""Declares a field that the entry `lr` of a param group holds: a number, or a schedule."""


class ScaleByLearningRate(Link):
    """The rule of `scale_by_learning_rate`; its arguments, unchecked.

    The group entry is a number, a 0-d tensor, or a schedule (of which the group shows the number).
    """

    learning_rate: Any = LEARNING_RATE()
    flip_sign: bool = option(True)

    def numbers(self, h: Any, t: int, op: Any) -> Mapping[str, Any]:
        """Return the rate with its sign."""
        return {"learning_rate": -h.learning_rate if self.flip_sign else h.learning_rate}

    def update(self, g, p, n, m, op):
        """Return (-lr) u, rounded once (contract D2)."""
        return n.learning_rate * g


def preheat(lr: float = 1e-3, preheat_steps: int = 3000, decay_power: float = -0.5) -> Schedule:
    """Return a schedule, for `lr`, that rises to `lr` and then falls as a power of the count of steps before.

        x = (count + 1) / preheat_steps;  lr min(x, x^decay_power)

    Args:
        lr: the largest rate, at step `preheat_steps`.
        preheat_steps: steps of the rise.
        decay_power: of the fall; 0 stays at the top, -0.5 falls as one over the square root of the step.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if a number is negative, `preheat_steps` is 0, or `decay_power` is above 0.

    Example:
        >>> schedule = preheat(1e-3, preheat_steps=100)
        >>> [f"{float(schedule(count)):.2e}" for count in (0, 49, 99, 399)]
        ['1.00e-05', '5.00e-04', '1.00e-03', '5.00e-04']

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017, section 5.3, for the powers 1 and
        -0.5; the arguments are those of adamw_bfloat16's schedule.
    """
    top, steps = nonnegative("preheat", "lr", lr), nonnegative("preheat", "preheat_steps", preheat_steps)
    fall = nonnegative("preheat", "-decay_power", -decay_power, "Use a power <= 0, such as -0.5.")
    if not steps:
        raise ValueError("preheat: preheat_steps=0 is no rise. Use 1 to start at the top.")

    def schedule(count: int) -> float:
        x = (count + 1) / steps
        return top * min(x, x**-fall)

    return schedule


def scale_by_learning_rate(learning_rate: float | Tensor | Schedule, *, flip_sign: bool = True) -> Rule:
    """Multiply the update by minus the learning rate: (-learning_rate) u, rounded once to float32.

    Group entry: `lr`. For a schedule the group shows the rate of the last step (before the first step, of the
    first), for loggers and state dicts. A 0 that is written there is used, as long as it stands. Any other
    number that is written there, as by `torch.optim.lr_scheduler`, changes nothing, and the log says so once.

    Args:
        learning_rate: a number, a tensor of one element (float32 or float64, read at every step), or a
            function. The function maps the parameter's count of steps so far (0 at the first) to a number.
        flip_sign: True to descend.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is negative.

    Example:
        >>> scale_by_learning_rate(1e-3).entries
        {'lr': 0.001}

    Source: contract D2.
    """
    if not callable(learning_rate):
        hint = "Use a number >= 0, or flip_sign=False to ascend."
        nonnegative("scale_by_learning_rate", "learning_rate", learning_rate, hint)
    return ScaleByLearningRate(learning_rate=learning_rate, flip_sign=flip_sign)
