"""The learning rate as an Optax transform.

Contract: section D.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from halfstep.rules.learning_rate import ScaleByLearningRate, preheated
from halfstep_jax.numbers.hyperparameters import as_nonnegative
from halfstep_jax.transform import transform_of


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
    return functools.partial(
        _of_float32, preheated(top, preheat_steps, decay_power, as_nonnegative, _minimum)
    )


def _of_float32(rate_at: optax.Schedule, count: jax.typing.ArrayLike) -> jax.Array:
    return rate_at(jnp.asarray(count).astype(jnp.float32))  # pyright: ignore[reportReturnType]


def _minimum(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.minimum(x, y)  # which a pickle does not hold


scale_by_learning_rate = transform_of(ScaleByLearningRate)
