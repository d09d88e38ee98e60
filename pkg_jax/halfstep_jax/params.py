"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax.exact import arrived
from halfstep_jax.leaves import Leaves, check_params, flatten_updates
from halfstep_jax.random_words import LeafKey, Role, leaf_id, leaf_keys
from halfstep_jax.rounding import round_in_float32
from halfstep_jax.schedules import next_count
from halfstep_jax.seeds import seed_words


class RoundStochasticallyState(NamedTuple):
    """State of `round_stochastically`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
    """

    count: jax.Array
    seed: jax.Array


def round_stochastically(seed=0) -> optax.GradientTransformationExtraArgs:
    """Round params + update stochastically to the dtype of the params: the last link of a chain.

    With q = stochastic(float32(p) + u), the link returns q - p in float32, and -0.0 where q = p;
    `optax.apply_updates`, and so Flax's `TrainState` and `nnx.Optimizer`, then land on q. Small updates,
    which nearest rounding would drop, get through in the mean. Rounds p + u to float32, then to the dtype of
    p. Updates of float32 weights pass as they are.

    `optax.apply_updates` lands on nearest(p + (q - p)), which is q but in five corner classes: |q| below
    about 2^-16 |p|; q - p past the range of float32; q - p or a weight subnormal; p infinite; q = -0
    (contract P2).

    Sharded arrays get the bits of one device under `jax.jit`; inside `jax.shard_map` every shard counts its
    words from 0. The updates are float32. Wrappers around `jax.lax.cond`, such as `optax.apply_if_finite`,
    want updates in the dtype of the gradients: under bfloat16 gradients put them around earlier links, not
    around this one.

    Args:
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform that needs `params`.

    Raises:
        TypeError: if `seed` is no seed; from `init` and `update`, if a leaf is not float32, bfloat16 or
            float16.
        ValueError: if `seed` is out of range; from `update`, without `params`, or if trees or shapes differ.

    Example:
        >>> params = {"w": jnp.ones(1000, jnp.bfloat16)}
        >>> tx = round_stochastically(seed=0)
        >>> updates, state = tx.update({"w": jnp.full(1000, 2.0**-10)}, tx.init(params), params)
        >>> moved = optax.apply_updates(params, updates)["w"] != 1
        >>> print(f"{moved.mean():.2f}")
        0.12

    Source: ours (contract P2, P3); for the effect, P. Zamirai et al., "Revisiting BFloat16 training",
    arXiv:2010.06192, section 4.
    """
    function = "round_stochastically"
    seed = seed_words(function, seed)

    def init(params):
        check_params(function, params)
        return RoundStochasticallyState(jnp.zeros([], jnp.int32), seed)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                f"{function}: params is None; the link rounds params + update. "
                "Pass params to update(updates, state, params)."
            )
        leaves = flatten_updates(function, updates)
        count = next_count(state.count)
        us = _landing_updates(leaves, leaves.weights(params), state.seed, count)
        return us, RoundStochasticallyState(count, state.seed)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params, updates, seed, step):
    """Return params + updates, rounded stochastically to the dtype of the params.

    For a training loop of one's own, and for Equinox; to the bit what `round_stochastically` as the last link
    and `optax.apply_updates` give. Rounds p + u to float32, then to the dtype of p; float32 weights to
    float32 alone.

    Args:
        params: float32, bfloat16 or float16 leaves.
        updates: likewise; None leaves a weight as it is.
        seed: an integer in [0, 2^64) or two uint32 words (high, low). May be traced.
        step: 1 at the first update; each step needs its own. May be traced.

    Returns:
        The new params, in the dtypes of the old ones.

    Raises:
        TypeError: if a leaf is of another dtype, or `seed` is no seed.
        ValueError: if `seed` is out of range, or trees or shapes differ.

    Example:
        >>> params = apply_updates({"w": jnp.bfloat16(1.0)}, {"w": jnp.float32(0.5)}, seed=0, step=1)
        >>> print(params["w"], params["w"].dtype)
        1.5 bfloat16

    Source: ours (contract P1, P2).
    """
    function = "apply_updates"
    leaves = flatten_updates(function, updates)
    weights = leaves.weights(params)
    us = leaves.treedef.flatten_up_to(_landing_updates(leaves, weights, seed_words(function, seed), step))
    new = [p if u is None else _nearest_sum(p, u) for p, u in zip(weights, us, strict=True)]
    return leaves.treedef.unflatten(new)


def _landing_updates(leaves: Leaves, weights: list, seed: jax.Array, step):
    keys = leaf_keys(seed, step, [leaf_id(name) for name in leaves.names], (Role.PARAM,))
    return leaves.map(_landing_update, weights, keys.split())


def _landing_update(u: jax.Array, p: jax.Array, key: LeafKey) -> jax.Array:
    """Return the update that lands on stochastic(p + u)."""
    u = arrived(u, key.zero())
    if p.dtype == jnp.float32:
        return u
    p32 = p.astype(jnp.float32)
    q = round_in_float32(p32 + u, p.dtype.name, key.words(Role.PARAM, u.shape))
    return jnp.where(q == p32, np.float32(-0.0), q - p32)


def _nearest_sum(p: jax.Array, u: jax.Array) -> jax.Array:
    """Return nearest(p + u) in the dtype of p: the stored weight (contract P1)."""
    return round_in_float32(p.astype(jnp.float32) + u, p.dtype.name, None).astype(p.dtype)
