"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax.exact import hidden_zero, hide
from halfstep_jax.leaves import flatten_alike, flatten_updates
from halfstep_jax.random_words import Role, leaf_id, leaf_keys, words_of_key
from halfstep_jax.rounding import round_in_float32, round_to
from halfstep_jax.seeds import seed_words


class RoundStochasticallyState(NamedTuple):
    """State of `round_stochastically`: int32 count of the steps taken, uint32[2] seed."""

    count: jax.Array
    seed: jax.Array


def round_stochastically(seed=0):
    """Round params + update stochastically; the last link of a chain."""
    function = "round_stochastically"
    seed = seed_words(function, seed)

    def init(params):
        del params
        return RoundStochasticallyState(jnp.zeros([], jnp.int32), seed)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "round_stochastically: params is None; the link rounds params + update. Pass params to update(updates, state, params)."
            )
        count = optax.safe_increment(state.count)
        return _landing(function, params, updates, state.seed, count), RoundStochasticallyState(
            count, state.seed
        )

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params, updates, seed, step):
    """Return params + updates, rounded stochastically."""
    updates = _landing("apply_updates", params, updates, seed_words("apply_updates", seed), step)

    def add(p, u):
        return p if u is None else round_to(p.astype(jnp.float32) + u, p.dtype)

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def _landing(function, params, updates, seed, step):
    leaves = flatten_updates(function, updates)
    weights = flatten_alike(function, leaves, params, "weight", "Pass the params that the updates are for.")
    keys = leaf_keys(seed, step, [leaf_id(name) for name in leaves.names], (Role.PARAM,))
    us = []
    for i, (u, p) in enumerate(zip(leaves.values, weights, strict=True)):
        if u is None:
            us.append(None)
            continue
        u = hide(u.astype(jnp.float32), hidden_zero(keys.k0[i]))
        if p.dtype != jnp.float32:
            p32 = p.astype(jnp.float32)
            q = round_in_float32(p32 + u, p.dtype.name, words_of_key(keys.k0[i], keys.k1[0, i], p.shape))
            u = jnp.where(q == p32, np.float32(-0.0), q - p32)
        us.append(u)
    return leaves.treedef.unflatten(us)
