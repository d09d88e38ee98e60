"""The learning rate. Contract: section D."""

import functools
from collections.abc import Callable

from halfstep.hyperparameters import Scalar, check_nonnegative
from halfstep.rule import number
from halfstep.rules import learning_rate as shared
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.hyperparameters import nonnegative

LEARNING_RATE = functools.partial(
    number,
    schedule=True,
    torch="lr",
    check=functools.partial(check_nonnegative, hint="Use a number >= 0, or maximize=True to ascend."),
)
"""Field for the entry `lr` of a param group, a number or a schedule."""


class ScaleByLearningRate(shared.ScaleByLearningRate):
    """The rule in a named optimizer, which ascends by `maximize`."""

    learning_rate: Scalar = LEARNING_RATE()


scale_by_learning_rate = link_of(shared.ScaleByLearningRate)


def preheat(lr: float = 1e-3, preheat_steps: int = 3000, decay_power: float = -0.5) -> Callable[[int], float]:
    """Return a schedule for `lr` that rises linearly, and then falls as a power of the step count.

        x = (count + 1) / preheat_steps;  lr min(x, x^decay_power)

    Args:
        lr: the peak rate, reached at step `preheat_steps`.
        preheat_steps: the number of steps that rise.
        decay_power: a number of at most 0. 0 stays at the peak, and -0.5 is an inverse square root.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range, or `preheat_steps` is 0.

    Example:
        >>> schedule = preheat(1e-3, 100)
        >>> [round(schedule(count), 6) for count in (0, 49, 99, 399)]
        [1e-05, 0.0005, 0.001, 0.0005]

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017, section 5.3, for the powers 1 and
        -0.5; arguments as in the schedule of adamw_bfloat16.
    """
    top, steps = nonnegative("preheat", "lr", lr), nonnegative("preheat", "preheat_steps", preheat_steps)
    fall = nonnegative("preheat", "-decay_power", -decay_power, "Use a power <= 0, such as -0.5.")
    if not steps:
        raise ValueError("preheat: preheat_steps=0 is no rise. Use 1 to start at the top.")
    return functools.partial(_rate_at, top, steps, fall)


def _rate_at(top: float, steps: float, fall: float, count: float) -> float:
    x = (count + 1) / steps
    return top * min(x, x**-fall)
