"""Whether what a chain stores its weights by stands where it can: nothing after it may change its updates."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax.leaves import named_leaves
from halfstep_jax.weights.weight_rule import Landings, keeps_nothing, watched_landings

_LONGEST_AXIS = 4
# `optax.MultiSteps` returns zeros most of the time, and `reduce_on_plateau` waits for 10 steps.
_STEPS = 16


def check_chain(tx: optax.GradientTransformation, params: Any, **extra_args: Any) -> None:
    """Take steps on small arrays, and refuse a chain that undoes the rounding of its weights.

    Updates that land on 16-bit weights (`round_stochastically`, `compensate`, `split_params`,
    `keep_master_params`, and so every alias but with `param_storage="nearest"`) must reach
    `optax.apply_updates` as they are. Scaled, averaged or projected, they land between two weights and are
    rounded away. Such a link is named here, as is a chain that leaves 16-bit weights to nearest rounding.

    It takes 16 steps, so a link that acts later is not found. `params` and the state of a run are neither
    read nor changed.

    Args:
        tx: any Optax transform.
        params: the weights that it is for, or their shapes and dtypes; no axis is longer than 4 in the check.
        extra_args: what `tx.update` wants beside updates, state and params, such as `value`; it stays the
            same over the steps.

    Raises:
        TypeError: whatever `tx` raises.
        ValueError: naming the link and the weight; or whatever `tx` raises.

    Example:
        >>> from halfstep_jax import adamw
        >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> check_chain(adamw(1e-3), params)
        >>> check_chain(optax.chain(adamw(1e-3), optax.scale(0.5)), params)
        Traceback (most recent call last):
        ValueError: check_chain: scale changes the updates that round_stochastically lands on 'w', ...

    Source: ours.
    """
    small = jax.tree_util.tree_map_with_path(_small, params)
    trial = _try(tx, small, extra_args)
    for name in trial.narrow:
        if name in trial.wrong and name not in trial.landings.by:
            raise ValueError(
                f"check_chain: no link stores '{name}', which is of 16 bits: optax.apply_updates rounds it "
                "to nearest, and updates below half a unit in its last place are lost. "
                "End the chain with round_stochastically(), or wrap it in store_params(...)."
            )
    changed = [name for name in trial.narrow if name in trial.wrong]
    if changed:
        name = changed[0]
        raise ValueError(
            f"check_chain: {_culprit(tx, small, extra_args, name)} changes the updates that "
            f"{trial.landings.by[name]} lands on '{name}', so they are rounded again and lost. "
            'Put it before: store_params(optax.chain(..., param_storage="nearest" in an alias, ...), '
            '"stochastic").'
        )


class _Trial:
    """What a few steps showed: leaves of 16 bits, what links stored, and leaves that none of these did."""

    def __init__(self, params):
        self.narrow = [name for name, p in named_leaves(params) if not keeps_nothing(p)]
        self.landings = Landings()
        self.wrong: set[str] = set()

    def look(self, updates) -> None:
        """Compare the updates of a step to what was landed."""
        for name, u in named_leaves(updates):
            if name not in self.narrow or not np.any(np.asarray(u)):
                continue
            landed, u = self.landings.updates, np.asarray(u, np.float32)
            # Under `optax.flatten` links see all weights as one, which has another name.
            if name in landed and not np.array_equal(u, landed[name]):
                self.wrong.add(name)
            elif name not in landed and not any(np.isin(u, x).all() for x in landed.values()):
                self.wrong.add(name)


def _try(tx: optax.GradientTransformation, params, extra_args: dict[str, Any]) -> _Trial:
    """Take steps with a gradient of ones."""
    trial = _Trial(params)
    update = optax.with_extra_args_support(tx).update
    gradient = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(lambda state: update(gradient, state, params, **extra_args))
    with watched_landings(trial.landings):
        state = tx.init(params)
        for _ in range(_STEPS):
            updates, state = step(state)
            trial.look(updates)
    return trial


def _culprit(tx: optax.GradientTransformation, params, extra_args, name: str) -> str:
    """Return the name of the link behind which the updates of a leaf are wrong."""
    links = _links(tx)
    for k in range(1, len(links) + 1):
        trial = _try(optax.chain(*links[:k]), params, extra_args)
        if name in trial.landings.by and name in trial.wrong:
            return (
                _culprit(links[k - 1], params, extra_args, name)
                if _links(links[k - 1])
                else _name(links[k - 1])
            )
    return _name(tx)


def _links(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """Return the links of an `optax.chain`; none of any other transform."""
    inits, updates = _closure(tx.init).get("init_fns"), _closure(tx.update).get("update_fns")
    if not inits or not updates or len(inits) != len(updates):
        return []
    return [optax.GradientTransformationExtraArgs(*pair) for pair in zip(inits, updates, strict=True)]


def _name(tx: optax.GradientTransformation) -> str:
    """Return the name of the function that made a transform."""
    update = tx.update
    while isinstance(inner := _closure(update).get("tx"), optax.GradientTransformation):
        update = inner.update
    rule = _closure(update).get("rule")
    return getattr(rule, "name", None) or getattr(update, "__qualname__", "a wrapper").split(".")[0]


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _small(path, p) -> jax.Array:
    return jnp.full([min(n, _LONGEST_AXIS) for n in p.shape], 0.05, p.dtype)
