"""The learning rate as an Optax transform.

Contract: section D.
"""

import dataclasses
from typing import Any

import optax

from halfstep_jax.numbers.exact import opaque
from halfstep_jax.rule import Rule, scalar_or_schedule
from halfstep_jax.transform import as_transform


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

    Returns:
        An Optax transform. Its updates are float32.

    Raises:
        TypeError: if `learning_rate` is no number, or an array of another dtype than float32; from `update`,
            if a leaf is not float32, bfloat16 or float16.
        ValueError: if `learning_rate` is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_learning_rate(0.5)
        >>> updates, _ = tx.update({"w": jnp.float32(1.0)}, tx.init({}))
        >>> float(updates["w"])
        -0.5

    Source: as `optax.scale_by_learning_rate` (contract D2).
    """
    return as_transform(ScaleByLearningRate(learning_rate, flip_sign))


@dataclasses.dataclass(frozen=True)
class ScaleByLearningRate(Rule):
    """The rule of `scale_by_learning_rate`."""

    name = "scale_by_learning_rate"

    learning_rate: Any = scalar_or_schedule(hint="Use a number >= 0, or flip_sign=False to ascend.")
    flip_sign: bool = True

    def update(self, g, p, n, moments, zero):
        """Return the product."""
        rate = -n.learning_rate if self.flip_sign else n.learning_rate
        return opaque(rate * g, zero)
