"""Skipping a step with an infinite or NaN gradient, or on request."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax.leaves import Leaves, check_state, flatten_updates
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.xla.shards import shards


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: the fields of the state of `optax.apply_if_finite`.

    Attributes:
        notfinite_count: int32 scalar, steps left out one after another up to now.
        last_finite: bool scalar, whether the last step was taken.
        total_notfinite: int32 scalar, steps left out in all.
        inner_state: of the wrapped transform.
    """

    notfinite_count: jax.Array
    last_finite: jax.Array
    total_notfinite: jax.Array
    inner_state: optax.OptState


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip a whole step if a gradient is not finite: weights, moments and counts stay.

        ok = all gradients finite, and not skip
        u, state <- inner.update(g, state)   if ok, else -0.0 and the state as it was

    -0.0 is the update that moves no weight. Nothing is rounded. `skip` is a bool that may be passed to
    `update` too: a step that the caller leaves out, as at a spike of the loss.

    In place of `optax.apply_if_finite`, which wants updates in the dtype of the gradients: updates of this
    package are float32. Optax's transform gives up after a number of such steps; here `notfinite_count` shows
    them.

    Under `jax.jit` a sharded gradient is looked at as a whole. In `jax.shard_map` every shard would decide
    for itself: give `skip` there, made of all shards, as by `jax.lax.pmax`. Without it, `in_shard_map` raises
    for a gradient that is cut.

    Args:
        inner: any Optax transform: a whole chain.

    Raises:
        TypeError: from `update`, if a gradient is not float32, bfloat16, float16 or float64; or whatever
            `inner` raises.
        ValueError: from `update`, if `in_shard_map` names a gradient as cut, and `skip` is not given.

    Example:
        >>> from halfstep_jax import adamw
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = skip_nonfinite(adamw(1e-2))
        >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.inf])}, tx.init(params), params)
        >>> updates["w"].tolist(), int(state.total_notfinite), int(state.inner_state[0].count)
        ([-0.0, -0.0], 1, 0)

    Source: ours; the state is that of `optax.apply_if_finite`.
    """
    inner_update = optax.with_extra_args_support(inner).update

    def init(params):
        zero = jnp.zeros([], jnp.int32)
        return SkipNonfiniteState(zero, jnp.array(True), jnp.zeros([], jnp.int32), inner.init(params))

    def update(updates, state, params=None, *, skip: jax.typing.ArrayLike = False, **extra_args):
        check_state("skip_nonfinite", state, SkipNonfiniteState)
        leaves = flatten_updates("skip_nonfinite", updates)
        if skip is False:
            _refuse_shards(leaves)
        gradients = [g for g in leaves.values if g is not None]
        ok = jnp.logical_not(jnp.asarray(skip))
        for g in gradients:
            ok = ok & jnp.isfinite(g).all()
        us, inner_state = inner_update(updates, state.inner_state, params, **extra_args)
        # Selects, not a branch: they are part of the kernels that make the new state.
        us = jax.tree.map(lambda u: jnp.where(ok, u, np.array(-0.0, u.dtype)), us)
        inner_state = jax.tree.map(lambda new, old: jnp.where(ok, new, old), inner_state, state.inner_state)
        in_a_row = jnp.where(ok, 0, next_count(state.notfinite_count))
        total = jnp.where(ok, state.total_notfinite, next_count(state.total_notfinite))
        return us, SkipNonfiniteState(in_a_row, ok, total, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_shards(leaves: Leaves) -> None:
    """Refuse known shards: a device that leaves a step out alone would lose step with the others."""
    for name, shard in zip(leaves.names, shards(leaves.caller, leaves.names, leaves.values), strict=True):
        if shard is not None and shard.axes:
            raise ValueError(
                f"{leaves.caller}: inside jax.shard_map '{name}' is cut over {shard.axes}, and each device "
                f"would decide alone. Pass skip=jax.lax.pmax(bad, {shard.axes}) to update, with bad 1 where "
                "a gradient here is not finite, else 0."
            )
