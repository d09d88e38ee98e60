"""Numbers that may follow a schedule: fixed, or read at every step.

Contract: A6, section D.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.hyperparameters import PEAK_COUNTS, Scalar
from halfstep_jax.numbers.hyperparameters import as_float32


class ScheduleState(NamedTuple):
    """State of a link with a scheduled number.

    Attributes:
        count: int32 scalar, steps taken.
    """

    count: jax.Array


def at_count(caller: str, name: str, value: optax.ScalarOrSchedule, count) -> Scalar:
    """Return the float32 number of this step; a schedule is read at the count before it."""
    if not callable(value):
        return value
    now: Scalar = value(count)
    dtype = getattr(now, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.float64):
        now = jnp.asarray(now).astype(jnp.float32)
    return as_float32(caller, name, now)


def coming(caller: str, name: str, schedule: Callable, count: jax.Array, steps: int) -> jax.Array:
    """Return the float32 numbers of a schedule at `count` and the counts that follow."""
    counts = count + np.arange(steps, dtype=np.int32)

    def at(count):
        return jnp.asarray(at_count(caller, name, schedule, count), jnp.float32)

    try:
        return _each(at, counts)
    except jax.errors.JAXTypeError:  # a schedule that branches on a count, which it gets op by op
        return jnp.stack([at(k) for k in counts])


def _each(at: Callable, counts: jax.typing.ArrayLike) -> jax.Array:
    """Return the numbers at all counts."""
    try:
        return jax.vmap(at)(counts)
    except (NotImplementedError, ValueError):  # of a schedule that calls the host
        return jax.lax.map(at, jnp.asarray(counts))


def peak_of(schedule: Callable) -> np.floating | None:
    """Return about the largest value of a schedule, over `PEAK_COUNTS`; None if it is traced."""
    with jax.ensure_compile_time_eval():
        try:
            rates = _each(lambda count: jnp.asarray(schedule(count), jnp.float32), np.array(PEAK_COUNTS))
            return np.float32(rates.max())
        except jax.errors.JAXTypeError:
            return None


def checked_peak_of(caller: str, schedule: Callable) -> np.floating | None:
    """Return `peak_of` a schedule of learning rates, and refuse one that is negative."""
    peak = peak_of(schedule)
    if peak is not None and peak < 0:
        raise ValueError(
            f"{caller}: the largest rate of the schedule learning_rate is {peak:.7g}, and "
            "feedback of rounding errors divides by rates above 0. Negate the gradients, or use another "
            "param_storage."
        )
    return peak


def is_zero(number) -> bool:
    """Whether a number is the constant 0."""
    return isinstance(number, np.floating) and number == 0


def next_count(count: jax.Array) -> jax.Array:
    """Return count + 1 in the dtype of `count`, saturated."""
    return jnp.asarray(optax.safe_increment(count))
