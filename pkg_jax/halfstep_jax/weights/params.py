"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from halfstep_jax.leaf_calls import call_per_shape
from halfstep_jax.leaves import Leaves, check_params, flatten_updates
from halfstep_jax.numbers.exact import opaque, opaque_input, opaque_zero
from halfstep_jax.numbers.random_words import LeafKeys, Role, leaf_id, leaf_keys
from halfstep_jax.numbers.rounding import round_and_cast, round_in_float32
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import seed_words


class RoundStochasticallyState(NamedTuple):
    """State of `round_stochastically`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
    """

    count: jax.Array
    seed: jax.Array


class CompensateState(NamedTuple):
    """State of `compensate`.

    Attributes:
        compensation: what rounding has lost of the weights so far, bfloat16, in their tree; one number that
            means nothing for a float32 weight.
    """

    compensation: optax.Params


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
    caller = "round_stochastically"
    seed = seed_words(caller, seed)

    def init(params):
        check_params(caller, params)
        return RoundStochasticallyState(jnp.zeros([], jnp.int32), seed)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        need_params(caller, params, "the link rounds params + update")
        leaves = flatten_updates(caller, updates)
        count = next_count(state.count)
        us = _landing_updates(leaves, leaves.weights(params), state.seed, count)
        return us, RoundStochasticallyState(count, state.seed)

    return optax.GradientTransformationExtraArgs(init, update)


def compensate() -> optax.GradientTransformationExtraArgs:
    """Keep what rounding the weights loses, and add it to the next update: Kahan's sum, the last link.

    With c the compensation, in bfloat16, and s = u + c:

        n = nearest(float32(p) + s);  c <- nearest(s - (n - p))

    and the link returns n - p in float32, and -0.0 where n = p; `optax.apply_updates` lands on n. Rounds u +
    c, p + s and c. What rounding c loses is lost, and that is where it ends: in bfloat16, an equal update at
    every step moves weights to within 2 % from about 2^-12 of the weight up, and not at all below 2^-18; from
    there on take `split_params`. Updates of float32 weights pass as they are, and nothing is kept for them.

    Returns:
        An Optax transform that needs `params`. Its updates are float32.

    Raises:
        TypeError: from `init` and `update`, if a leaf is not float32, bfloat16 or float16.
        ValueError: from `update`, without `params`, or if trees or shapes differ.

    Example:
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = compensate()
        >>> state = tx.init(params)
        >>> for _ in range(8):
        ...     updates, state = tx.update({"w": jnp.full(2, 2.0**-10)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].tolist()
        [1.0078125, 1.0078125]

    Source: W. Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; for bfloat16 weights
    P. Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192, section 4 (contract P4).
    """
    caller = "compensate"

    def init(params):
        check_params(caller, params)
        return CompensateState(jax.tree.map(_no_compensation, params))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        need_params(caller, params, "the link rounds params + update")
        leaves = flatten_updates(caller, updates)
        weights = leaves.weights(params)
        compensations = kept_arrays(leaves, weights, state.compensation, jnp.bfloat16)
        zero = opaque_zero()
        rows = [
            (None, c) if u is None else _compensated(opaque_input(u, zero), p, c, zero)
            for u, p, c in zip(leaves.values, weights, compensations, strict=True)
        ]
        us, compensation = leaves.unzip(2, rows)
        return us, CompensateState(compensation)

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
    caller = "apply_updates"
    leaves = flatten_updates(caller, updates)
    weights = leaves.weights(params)
    us = leaves.treedef.flatten_up_to(_landing_updates(leaves, weights, seed_words(caller, seed), step))
    new = [p if u is None else _nearest_sum(p, u) for p, u in zip(weights, us, strict=True)]
    return leaves.treedef.unflatten(new)


def landing(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the update that takes the weight p to q: q - p in float32, and -0.0 where they are equal.

    -0.0 is the one number that moves no weight, neither an infinity nor a zero of either sign.
    """
    return jnp.where(q == p, np.float32(-0.0), q - p)


def need_params(caller: str, params, why: str) -> None:
    """Refuse an `update` without params.

    Raises:
        ValueError: if `params` is None.
    """
    if params is None:
        raise ValueError(f"{caller}: params is None; {why}. Pass params to update(updates, state, params).")


def kept_arrays(leaves: Leaves, weights: list, kept, dtype) -> list:
    """Return what is kept beside every weight, and refuse what `init` would not have made.

    Args:
        leaves: of the updates.
        weights: of the leaves.
        kept: the tree of what is kept.
        dtype: of what is kept beside a 16-bit weight.

    Raises:
        ValueError: if the tree, a shape or a dtype differs.
    """
    arrays = leaves.match_any_shape(kept, "state", "Pass the tree that init saw.")
    for name, u, p, array in zip(leaves.names, leaves.values, weights, arrays, strict=True):
        if u is None or p.dtype == jnp.float32 or (array.shape, array.dtype) == (p.shape, dtype):
            continue
        raise ValueError(
            f"{leaves.caller}: the state keeps {array.dtype}{list(array.shape)} beside '{name}', not "
            f"{jnp.dtype(dtype).name}{list(p.shape)}. Pass the state that init made."
        )
    return arrays


def nothing_kept(dtype=jnp.uint8) -> jax.Array:
    """Return what stands for a weight of which nothing is kept: not empty, as orbax saves no empty array."""
    return jnp.zeros(1, dtype)


def _landing_updates(leaves: Leaves, weights: list, seed: jax.Array, step):
    keys = leaf_keys(seed, step, [leaf_id(name) for name in leaves.names], (Role.PARAM,))
    return leaves.map(
        lambda u, p, place: call_per_shape(_landing_update, None, keys, place, u, p), weights, keys.places
    )


def _landing_update(_, keys: LeafKeys, place, u: jax.Array, p: jax.Array) -> jax.Array:
    """Return the update that lands on stochastic(p + u)."""
    key = keys.of_leaf(place)
    u = opaque_input(u, key.opaque_zero())
    if p.dtype == jnp.float32:
        return u
    p32 = p.astype(jnp.float32)
    q = round_in_float32(p32 + u, p.dtype.name, key.words(Role.PARAM, u.shape))
    return landing(p32, q)


def _no_compensation(p) -> jax.Array:
    return nothing_kept(jnp.bfloat16) if p.dtype == jnp.float32 else jnp.zeros_like(p, dtype=jnp.bfloat16)


def _compensated(
    u: jax.Array, p: jax.Array, compensation: jax.Array, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the update that lands on nearest(p + u + compensation), and the new compensation."""
    if p.dtype == jnp.float32:
        return u, compensation
    p32 = p.astype(jnp.float32)
    s = u + compensation.astype(jnp.float32)
    n = round_in_float32(p32 + s, p.dtype.name, None)
    compensation = round_and_cast(s - (n - p32), "bfloat16", None, saturate=True)
    # XLA on TPU fuses one result that reads another, not two that read a third: one reads zero bits.
    read = lax.bitcast_convert_type(compensation, jnp.uint16).astype(jnp.uint32) & zero
    return opaque(landing(p32, n), read), compensation


def _nearest_sum(p: jax.Array, u: jax.Array) -> jax.Array:
    """Return nearest(p + u) in the dtype of p: the stored weight (contract P1)."""
    return round_in_float32(p.astype(jnp.float32) + u, p.dtype.name, None).astype(p.dtype)
