"""A check that one gradient with a NaN does not end the training of a transform that skips such steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.hyperparameters import Arguments
from halfstep_jax.leaf_calls import Tree

_LONGEST_AXIS = 4
_MOST_STEPS = 1000
_KEPT = (
    "after one NaN in a gradient no weight moves again: a transform outside of the one that skips steps "
    "keeps the NaN. Skip outside: skip_nonfinite(optax.MultiSteps(...).gradient_transformation())."
)


def small(tree: Tree, value: float) -> Tree:
    """Return small arrays of one value in the place of large ones, for trial steps."""
    return jax.tree.map(lambda x: jnp.full([min(n, _LONGEST_AXIS) for n in x.shape], value, x.dtype), tree)


def advice_on_nan(
    tx: optax.GradientTransformation, params: Tree, gradient: Tree, extra_args: Arguments
) -> str:
    """Return the fault if no weight moves after one NaN; "" if some do, or no step is ever skipped.

    Steps with the gradient up to the first that moves a weight, one with NaN, and twice as many again: an
    accumulation that the NaN spoils is skipped, and the next must move weights.
    """
    state = tx.init(params)
    if not _skips(state):
        return ""
    update = optax.with_extra_args_support(tx).update
    step = jax.jit(lambda gradient, state: update(gradient, state, params, **extra_args))
    before, state = _steps_to_move(step, gradient, state, _MOST_STEPS)
    if before is None:
        return ""
    _, state = step(jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), gradient), state)
    after, _ = _steps_to_move(step, gradient, state, 2 * before)
    return _KEPT if after is None else ""


def _skips(state: Tree) -> bool:
    """Whether a state has that of `skip_nonfinite` or of `optax.apply_if_finite`."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "total_notfinite"))
    return any(hasattr(x, "total_notfinite") for x in nodes)


def _steps_to_move(step, gradient, state, most: int) -> tuple[int | None, Tree]:
    """Return after how many steps a weight moves, or None, and the state."""
    for k in range(1, most + 1):
        updates, state = step(gradient, state)
        if any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates)):
            return k, state
    return None, state
