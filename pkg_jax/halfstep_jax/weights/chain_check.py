"""Checks that no link changes the updates after the link that stores the weights."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.hyperparameters import Arguments
from halfstep_jax.leaf_calls import Tree, may_wait
from halfstep_jax.leaves import named_leaves
from halfstep_jax.link_reports import checked_chain
from halfstep_jax.watched_updates import WatchedUpdates, is_wide, watching
from halfstep_jax.weights.nan_check import advice_on_nan, small

# `optax.MultiSteps` returns zeros most of the time, and `reduce_on_plateau` waits for 10 steps.
_STEPS = 16
# Wrappers that move weights themselves: how, and the storage that works around them.
_MOVERS = {
    "lookahead": ("moves weights between a fast and a slow copy", "stochastic"),
    "schedule_free": ("averages weights", "split16"),
    "sam": ("moves weights to where it takes a gradient, and back", "split16"),
    "mechanize": ("moves weights from where they began", "split16"),
}

_LEFT_OUT = (
    "check_chain: a wrapper leaves steps out by lax.cond, with zeros in the dtype of the gradients, and what "
    "is applied to 16-bit weights is float32. Wrap by skip_nonfinite, or give the wrapper float32 gradients: "
    "optax.chain(optax.stateless(lambda g, _: optax.tree.cast(g, jnp.float32)), wrapper)."
)


class ChainFault(NamedTuple):
    """A change of updates by a chain after a link has stored the weights.

    Attributes:
        link: the link or wrapper that changes them, by its name.
        storage: the link that stored the weights.
        leaves: the weights with changed updates.
        advice: a sentence: the effect, and the remedy.
    """

    link: str
    storage: str
    leaves: frozenset[str]
    advice: str


def chain(
    *links: optax.GradientTransformation, **extra_args: object
) -> optax.GradientTransformationExtraArgs:
    """Do as `optax.chain`; `init` refuses a chain that loses updates of 16-bit weights.

    `init` calls `check_chain`, which only traces one step where the link that stores the weights is the last.
    The updates are as in `optax.chain`. Use it for a whole optimizer. A part of one need not store
    weights, and belongs into `optax.chain`.

    Args:
        links: Optax transforms, in the order in which they run; at least one.
        extra_args: for the check: further arguments of `update`, such as `value=1.0`.

    Raises:
        ValueError: in `init`, as `check_chain`; here, if there are no links.

    Example:
        >>> from halfstep_jax import adamw
        >>> chain(adamw(1e-3), optax.scale(0.5)).init({"w": jnp.ones(3, jnp.bfloat16)})
        Traceback (most recent call last):
        ValueError: check_chain: scale changes the updates that round_stochastically applies to 'w', ...

    Source: ours.
    """
    if not links:
        raise ValueError(
            "chain: there are no links. Pass transforms, such as chain(scale_by_adam(), "
            "scale_by_learning_rate(1e-3), round_stochastically())."
        )
    tx = optax.chain(*links)

    def init(params):
        check_chain(tx, params, **extra_args)
        with checked_chain():
            return tx.init(params)

    return may_wait(optax.GradientTransformationExtraArgs(init, tx.update), links)


def check_chain(tx: optax.GradientTransformation, params: Tree, **extra_args: object) -> None:
    """Take steps on small arrays, and refuse a chain that undoes the rounding of its weights.

    Updates of 16-bit weights by `round_stochastically`, `compensate`, `split_params` or `keep_master_params`,
    and so by every alias without `param_storage="nearest"`, must reach `optax.apply_updates` as they are.
    Scaled, averaged or projected, they end between two weights and are rounded away. Such a link is named
    here, as is a chain that leaves 16-bit weights to nearest rounding.

    It takes 16 steps, or as many as `optax.lookahead` needs to move its weights. A link that acts later is
    not found. Where steps with a NaN are skipped, one such step is taken, after which weights must move
    again. `params` and the state of a run are neither read nor changed.

    Args:
        tx: any Optax transform.
        params: the weights that it is for, or their shapes and dtypes; no axis is longer than 4 in the check.
            Of `optax.lookahead` the weights, or its `LookaheadParams`.
        extra_args: further arguments of `tx.update`, such as `value`, which stay the same
            over the steps.

    Raises:
        TypeError: if a wrapper wants updates in the dtype of the gradients; or whatever `tx` raises.
        ValueError: naming the link and the weight; or whatever `tx` raises.

    Example:
        >>> from halfstep_jax import adamw
        >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> check_chain(adamw(1e-3), params)
        >>> check_chain(optax.chain(adamw(1e-3), optax.scale(0.5)), params)
        Traceback (most recent call last):
        ValueError: check_chain: scale changes the updates that round_stochastically applies to 'w', ...

    Source: ours.
    """
    with checked_chain(), jax.ensure_compile_time_eval():  # also where `init` is traced
        stand_ins = _small_params(tx, params)
        intact = _traced(tx, stand_ins, extra_args).intact
        if kept := advice_on_nan(tx, stand_ins, _gradient(stand_ins), extra_args):
            raise ValueError(f"check_chain: {kept}")
        if intact:
            return
        trial = _try(tx, stand_ins, extra_args)
        fault = _fault(tx, stand_ins, extra_args, trial)
    for name in trial.narrow:
        if name in trial.wrong and not trial.stored_by(name):
            raise ValueError(
                f"check_chain: no link stores '{name}', which is of 16 bits: optax.apply_updates rounds it "
                "to nearest, and updates below half a unit in its last place are lost. "
                "End the chain with round_stochastically(), or wrap it in store_params(...)."
            )
    if fault:
        raise ValueError(f"check_chain: {fault.advice}")


@checked_chain()
def chain_fault(tx: optax.GradientTransformation, params: Tree, extra_args: Arguments) -> ChainFault | None:
    """Return the fault of a chain that stores weights; None if it has none, or stores none."""
    stand_ins = _small_params(tx, params)
    try:
        found = _traced(tx, stand_ins, extra_args)
    except _StepsLeftOut:
        tx = optax.chain(optax.stateless(lambda g, _: optax.tree.cast(g, jnp.float32)), tx)
        found = _traced(tx, stand_ins, extra_args)
    if found.intact or not found.by:
        return None
    return _fault(tx, stand_ins, extra_args, _try(tx, stand_ins, extra_args))


def as_stepped(tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Return weights in the form in which a transform steps them: `optax.lookahead` has two copies."""
    has_copies = any(_name(link) == "lookahead" for link in _links(tx) or [tx])
    if has_copies and not isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams.init_synced(params)
    return params


class _StepsLeftOut(TypeError):
    """A wrapper that leaves steps out wants updates in the dtype of the gradients."""


class _Traced(NamedTuple):
    """The findings of a traced step.

    Attributes:
        by: of the leaves of 16 bits, the link that stored each last.
        intact: whether the updates of all of them are the arrays that these links returned.
    """

    by: dict[str, str]
    intact: bool


def _traced(tx: optax.GradientTransformation, params, extra_args: Arguments) -> _Traced:
    """Trace a step, in which an array that nothing changes stays the same object."""
    watched, intact = WatchedUpdates(), []
    update = optax.with_extra_args_support(tx).update

    def step(gradient, params):
        state = tx.init(params)
        with watching(watched):
            updates, state = update(gradient, state, params, **extra_args)
        after = dict(named_leaves(updates))
        intact.append(all(name in after and after[name] is watched.returned.get(name) for name in narrow))
        return updates

    narrow = [name for name, p in named_leaves(params) if not is_wide(p)]
    try:
        jax.eval_shape(step, _gradient(params), params)
    except TypeError as error:
        if "cond branches" in str(error) or "optax.apply_if_finite" in str(error):
            raise _StepsLeftOut(_LEFT_OUT) from None
        if missing := re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error)):
            raise TypeError(
                f"check_chain: update of this chain wants {missing[1]} by name, and the check takes steps. "
                "Pass it to chain or check_chain too, such as chain(..., value=1.0)."
            ) from error
        raise
    return _Traced(watched.by, intact[0])


class _Trial:
    """The findings of trial steps: the 16-bit leaves, the results of links, and wrong leaves."""

    def __init__(self, params):
        self.narrow = [name for name, p in named_leaves(params) if not is_wide(p)]
        self.watched = WatchedUpdates()
        self.wrong: set[str] = set()

    def look(self, updates) -> None:
        """Compare the updates of a step with the results of links."""
        for name, u in named_leaves(updates):
            if name not in self.narrow or not np.any(np.asarray(u)):
                continue
            returned, u = self.watched.updates, np.asarray(u, np.float32)
            if name in returned and not np.array_equal(u, returned[name]):
                self.wrong.add(name)
            elif name not in returned and not any(np.isin(u, x).all() for x in returned.values()):
                self.wrong.add(name)

    def stored_by(self, name: str) -> str | None:
        """Return the link that stored a leaf; None if none did."""
        by = self.watched.by
        # Under `optax.flatten` and in `optax.LookaheadParams` links see weights of other names.
        renamed = next((link for other, link in by.items() if other not in self.narrow), None)
        return by.get(name, renamed)


def _try(tx: optax.GradientTransformation, params, extra_args: Arguments) -> _Trial:
    """Take steps with a gradient of ones."""
    trial = _Trial(params)
    update = optax.with_extra_args_support(tx).update
    gradient = _gradient(params)
    step = jax.jit(lambda state: update(gradient, state, params, **extra_args))
    with watching(trial.watched):
        state = tx.init(params)
        for _ in range(max(_STEPS, *map(_period, _links(tx) or [tx]))):
            updates, state = step(state)
            trial.look(updates)
    return trial


def _period(tx: optax.GradientTransformation) -> int:
    """Return the sync period of `optax.lookahead`; 1 for any other transform."""
    return int(_closure(_update(tx)).get("sync_period", 1))


def _fault(
    tx: optax.GradientTransformation, params, extra_args: Arguments, trial: _Trial
) -> ChainFault | None:
    """Return which link changed the updates of a trial; None if none did."""
    changed = [name for name in trial.narrow if name in trial.wrong and trial.stored_by(name)]
    if not changed:
        return None
    name = changed[0]
    culprit, storage = _culprit(tx, params, extra_args, name), str(trial.stored_by(name))
    link = _name(culprit)
    if link == "cast_updates":
        advice = (
            f"cast_updates rounds the updates that {storage} applies to '{name}', and the bits kept in the "
            'state are then of another weight. Use param_storage="stochastic", "feedback" or "compensated".'
        )
        return ChainFault(link, storage, frozenset(changed), advice)
    what = f"changes the updates that {storage} applies to '{name}', so they are rounded again and lost"
    if link in _MOVERS or _traced(culprit, params, extra_args).by:
        does, around = _MOVERS.get(link, ("wraps what stores the weights", "split16"))
        inside = f'store_params({link}(..., param_storage="nearest" in its alias, ...), "{around}")'
        advice = f"{link} {does}. It {what}. Store the weights outside of it: {inside}."
    else:
        inside = 'store_params(optax.chain(..., param_storage="nearest" in an alias, ...), "stochastic")'
        way = f"Put it before: {inside}."
        if storage.endswith("_fed_back"):
            way = f"Give a schedule to learning_rate. Or give up feedback: {inside}."
        advice = f"{link} {what}. {way}"
    return ChainFault(link, storage, frozenset(changed), advice)


def _culprit(tx: optax.GradientTransformation, params, extra_args, name: str) -> optax.GradientTransformation:
    """Return the link or wrapper after which the updates of a leaf are wrong."""
    links = _links(tx)
    for k in range(1, len(links) + 1):
        first = optax.chain(*links[:k])
        found = _traced(first, params, extra_args)
        if found.intact or not found.by:
            continue  # a trace tells it, without a step
        trial = _try(first, params, extra_args)
        if trial.stored_by(name) and name in trial.wrong:
            return links[k - 1]
    return tx


def _links(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """Return the links of an `optax.chain`, also nested ones; none for other transforms."""
    made_by = _closure(tx.init).get("tx", tx)  # of `chain`
    update = _closure(tx.update).get("update", tx.update)  # of an alias
    inits, updates = _closure(made_by.init).get("init_fns"), _closure(update).get("update_fns")
    if not inits or not updates or len(inits) != len(updates):
        return []
    links = [optax.GradientTransformationExtraArgs(*pair) for pair in zip(inits, updates, strict=True)]
    return [inner for link in links for inner in _links(link) or [link]]


def _name(tx: optax.GradientTransformation) -> str:
    """Return the name of the function that made a transform."""
    update = _update(tx)
    return getattr(_closure(update).get("rule"), "name", None) or _function(update)


def _update(tx: optax.GradientTransformation) -> Callable:
    """Return the update of a transform without the wrapper that passes extra arguments."""
    update = tx.update
    while _function(update) == "with_extra_args_support":
        update = _closure(update)["tx"].update
    return update


def _function(update: Callable) -> str:
    return getattr(update, "__qualname__", "a wrapper").split(".")[0]


def _closure(function: Callable) -> dict[str, Any]:  # of any library's function
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _gradient(params):
    """Return a gradient of ones; for `optax.lookahead`, that of its fast weights."""
    return jax.tree.map(jnp.ones_like, params.fast if isinstance(params, optax.LookaheadParams) else params)


def _small_params(tx: optax.GradientTransformation, params):
    """Return small stand-ins for the weights, in the form that the transform steps."""
    return as_stepped(tx, small(params, 0.05))
