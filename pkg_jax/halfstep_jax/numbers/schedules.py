"""Rates that a link multiplies by: fixed, or read from a schedule at every step.

Contract: A6, section D.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax.numbers.hyperparameters import as_float32, nonnegative


class ScheduleState(NamedTuple):
    """State of a link whose rate follows a schedule.

    Attributes:
        count: int32 scalar, steps taken.
    """

    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate of one link.

    Attributes:
        function: the link, and
        name: its argument, for errors.
        fixed: the float32 rate; None where there is a schedule.
        schedule: from the count before its increment to the rate; None where it is fixed.
    """

    function: str
    name: str
    fixed: Any = None
    schedule: Callable[[Any], Any] | None = None

    @property
    def is_zero(self) -> bool:
        """Whether the rate is the number 0, known before any step."""
        return isinstance(self.fixed, np.floating) and self.fixed == 0

    def init(self, params) -> ScheduleState | optax.EmptyState:
        """Return the state before the first step."""
        del params
        return optax.EmptyState() if self.schedule is None else ScheduleState(jnp.zeros([], jnp.int32))

    def read(self, state) -> tuple[jax.Array, Any]:
        """Return the float32 rate of this step, and the next state.

        Raises:
            TypeError: if the schedule gives no number, or an array narrower than float32.
            ValueError: if it gives no scalar.
        """
        if self.schedule is None:
            return jnp.asarray(self.fixed), state
        value = self.schedule(state.count)
        dtype = getattr(value, "dtype", None)
        if dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.float64):
            value = jnp.asarray(value).astype(jnp.float32)
        rate = as_float32(self.function, self.name, value)
        return jnp.asarray(rate), ScheduleState(next_count(state.count))


def as_rate(function: str, name: str, value, way_out: str = "Use a number >= 0.") -> Rate:
    """Return the rate that `value` is: a number >= 0, a float32 scalar array, or a schedule.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is negative.
    """
    if callable(value):
        return Rate(function, name, schedule=value)
    return Rate(function, name, fixed=nonnegative(function, name, value, way_out))


def next_count(count: jax.Array) -> jax.Array:
    """Return count + 1, in the dtype of `count`, and its largest value for ever after."""
    return jnp.asarray(optax.safe_increment(count))
