"""The learning rate. Contract: section D."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from halfstep_jax import hyperparameters
from halfstep_jax.exact import rounded
from halfstep_jax.leaves import flatten_updates


class ScaleByLearningRateState(NamedTuple):
    """State of a link with a schedule: int32 count of the steps taken."""

    count: jax.Array


def scale_by_learning_rate(learning_rate, *, flip_sign: bool = True):
    """Multiply the updates by -learning_rate."""
    function = "scale_by_learning_rate"
    if not callable(learning_rate):
        fixed = hyperparameters.nonnegative(
            function, "learning_rate", learning_rate, "Use a number >= 0, or flip_sign=False to ascend."
        )

    def init(params):
        del params
        return (
            ScaleByLearningRateState(jnp.zeros([], jnp.int32))
            if callable(learning_rate)
            else optax.EmptyState()
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        leaves = flatten_updates(function, updates)
        rate = (
            jnp.asarray(learning_rate(state.count), jnp.float32)
            if callable(learning_rate)
            else jnp.asarray(fixed)
        )
        rate = -rate if flip_sign else rate
        us = [None if u is None else rounded(rate * u.astype(jnp.float32)) for u in leaves.values]
        if callable(learning_rate):
            state = ScaleByLearningRateState(optax.safe_increment(state.count))
        return leaves.treedef.unflatten(us), state

    return optax.GradientTransformationExtraArgs(init, update)
