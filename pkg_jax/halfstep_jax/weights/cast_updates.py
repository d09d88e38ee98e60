"""Updates in the dtype of the weights, for libraries that add updates to weights themselves."""

import jax
import jax.numpy as jnp
import optax

from halfstep_jax.leaf_calls import Tree, call_per_shape
from halfstep_jax.leaves import HELD_BY_FLOAT32, flatten_updates
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.watched_updates import keeps_rounded_updates

_FUNCTION = "cast_updates"


def cast_updates() -> optax.GradientTransformationExtraArgs:
    """Cast updates to the dtype of their weights: the last link, where a library adds updates itself.

    With it `p + u` keeps the dtype of p, as in `eqx.apply_updates`, optimistix, flowjax and blackjax. Other
    loops need no cast: `optax.apply_updates` keeps the dtype, and adds the update in float32.

        tx = chain(adamw(1e-3), cast_updates())

    Rounds the update to nearest, once. In bfloat16 an update below 256 units in the last place of the new
    weight is exact, and `p + u` is the weight that `optax.apply_updates` gives. A larger one is off by
    2^-9 of itself at most. Updates of float32 weights stay as they are.

    "split8", "split16" and "master" keep further bits of exactly the weight that they show, so `check_chain`
    and `chain` refuse the cast after them. Use "stochastic", "feedback" or "compensated".

    Raises:
        TypeError: from `update`, if a leaf is not float32, bfloat16, float16 or float64.
        ValueError: from `update`, without `params`, or if trees or shapes differ.

    Example:
        >>> from halfstep_jax import adamw, chain
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> tx = chain(adamw(1e-2), cast_updates())
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> (params["w"] + updates["w"]).dtype
        dtype(bfloat16)

    Source: ours.
    """

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                f"{_FUNCTION}: params is None; the link casts to their dtypes. "
                "Pass params to update(updates, state, params)."
            )
        if keeps_rounded_updates():
            return updates, state
        leaves = flatten_updates(_FUNCTION, updates)
        leaves.weights(params)
        dtypes, given = leaves.weight_dtypes(params), leaves.treedef.flatten_up_to(updates)
        return leaves.map(_cast, dtypes, given), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _cast(u: jax.Array, dtype: str, given: Tree) -> Tree:
    """Return an update in the dtype of its weight: that of a float64 weight as it was given."""
    if dtype not in HELD_BY_FLOAT32:
        return given.astype(dtype)
    return call_per_shape(_rounded, dtype, u)


def _rounded(dtype: str, u: jax.Array) -> jax.Array:
    return round_and_cast(u.astype(jnp.float32), dtype, None)
