"""The learning rate as an Optax transform.

Contract: section D.
"""

import functools
from typing import Any

import jax.numpy as jnp
import optax

from halfstep.hyperparameters import check_nonnegative
from halfstep.rule import Rule, number
from halfstep_jax.numbers.hyperparameters import as_nonnegative
from halfstep_jax.transform import as_transform


def preheat(
    learning_rate: float = 1e-3, preheat_steps: int = 3000, decay_power: float = -0.5
) -> optax.Schedule:
    """Return a schedule that rises to `learning_rate` and then falls as a power of the step.

        x = (count + 1) / preheat_steps;  learning_rate min(x, x^decay_power)

    Args:
        learning_rate: the largest rate, at step `preheat_steps`.
        preheat_steps: steps of the rise.
        decay_power: of the fall; 0 stays at the top, -0.5 falls as one over the square root of the step.

    Returns:
        A schedule of the count before it is incremented, as Optax's.

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
    top = as_nonnegative("preheat", "learning_rate", learning_rate)
    steps = as_nonnegative("preheat", "preheat_steps", preheat_steps)
    fall = as_nonnegative("preheat", "-decay_power", -decay_power, "Use a power <= 0, such as -0.5.")
    if not steps:
        raise ValueError("preheat: preheat_steps=0 is no rise. Use 1 to start at the top.")

    def schedule(count):
        x = (jnp.asarray(count).astype(jnp.float32) + 1) / steps
        return top * jnp.minimum(x, x**-fall)

    return schedule


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule, *, flip_sign: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Multiply the updates by the learning rate: (-learning_rate) u, or learning_rate u without `flip_sign`.

    In float32, rounded once. (Optax's own link does the same, but a compiler may fuse its product with a sum
    that follows.)

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule, called with the count before it
            is incremented.
        flip_sign: True to descend.

    Errors are those of `scale_by_adam`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_learning_rate(0.5)
        >>> updates, _ = tx.update({"w": jnp.float32(1.0)}, tx.init({}))
        >>> float(updates["w"])
        -0.5

    Source: as `optax.scale_by_learning_rate` (contract D2).
    """
    return as_transform(ScaleByLearningRate(learning_rate, flip_sign))


class ScaleByLearningRate(Rule):
    """The rule of `scale_by_learning_rate`."""

    learning_rate: Any = number(
        schedule=True,
        check=functools.partial(check_nonnegative, hint="Use a number >= 0, or flip_sign=False to ascend."),
    )
    flip_sign: bool = True

    def update(self, g, p, n, m, op):
        """Return the product."""
        return (-n.learning_rate if self.flip_sign else n.learning_rate) * g
