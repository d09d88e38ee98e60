"""The learning rate. Contract: section D."""

import functools
from typing import Any

from halfstep.hyperparameters import check_nonnegative
from halfstep.rule import number
from halfstep.rules import learning_rate as shared
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.hyperparameters import nonnegative
from halfstep_torch.numbers.schedules import Schedule

LEARNING_RATE = functools.partial(
    number,
    schedule=True,
    torch="lr",
    check=functools.partial(check_nonnegative, hint="Use a number >= 0, or maximize=True to ascend."),
)
"""Declares a field that the entry `lr` of a param group holds: a number, or a schedule."""


class ScaleByLearningRate(shared.ScaleByLearningRate):
    """The rule in a named optimizer, which ascends by `maximize`."""

    learning_rate: Any = LEARNING_RATE()


scale_by_learning_rate = link_of(shared.ScaleByLearningRate)


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
