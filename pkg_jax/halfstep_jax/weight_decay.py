"""Weight decay. Contract: section D."""

import jax.numpy as jnp
import optax

from halfstep_jax import hyperparameters
from halfstep_jax.exact import rounded
from halfstep_jax.learning_rate import ScaleByLearningRateState
from halfstep_jax.leaves import flatten_alike, flatten_updates


def add_decayed_weights(weight_decay=0.0, mask=None, *, absolute: bool = False):
    """Add the weights, times `weight_decay`, to the updates."""
    function = "add_decayed_weights"
    if not callable(weight_decay):
        decay = hyperparameters.nonnegative(function, "weight_decay", weight_decay)

    def init(params):
        del params
        return (
            ScaleByLearningRateState(jnp.zeros([], jnp.int32))
            if callable(weight_decay)
            else optax.EmptyState()
        )

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "add_decayed_weights: params is None; the link adds weight_decay * params. Pass params to update(updates, state, params)."
            )
        leaves = flatten_updates(function, updates)
        weights = flatten_alike(
            function, leaves, params, "weight", "Pass the params that the updates are for."
        )
        rate = (
            jnp.asarray(weight_decay(state.count), jnp.float32)
            if callable(weight_decay)
            else jnp.asarray(decay)
        )
        us = []
        for u, p in zip(leaves.values, weights, strict=True):
            if u is None:
                us.append(None)
                continue
            d = rounded(rate * p.astype(jnp.float32))
            u = u.astype(jnp.float32)
            us.append(u - d if absolute else u + d)
        if callable(weight_decay):
            state = ScaleByLearningRateState(optax.safe_increment(state.count))
        return leaves.treedef.unflatten(us), state

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if mask is None else optax.masked(tx, mask)
