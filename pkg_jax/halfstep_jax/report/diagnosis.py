"""The losses of a run in 16 bits: dropped updates and decay, frozen moments, wrong norms.

Nothing here knows how a transform works. It takes trial steps: as it is, and with gradients of zero. A
weight that does not move would lose its update.
"""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import optax

from halfstep.diagnosis import RANGES, Count, Diagnosis, Ends, Wording, diagnosis_of
from halfstep.hyperparameters import Arguments
from halfstep_jax.gradients.accumulation import AccumulateGradientsState
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import check_params, named_leaves
from halfstep_jax.numbers.global_norm import global_norm
from halfstep_jax.report.description import describe, weights_that_links_store
from halfstep_jax.report.moment_probe import NARROW, PAIRS, SUMS, diagnose_moments, nonfinite_moments
from halfstep_jax.storage.ends import count_outside
from halfstep_jax.storage.format_tag import check_tags
from halfstep_jax.watched_updates import WatchedUpdates, watching
from halfstep_jax.weights.chain_check import as_stepped, chain_fault
from halfstep_jax.weights.nan_check import advice_on_nan, small
from halfstep_jax.weights.narrow_weights import Compensate

_FUNCTION = "diagnose"
# `optax.lookahead` moves its slow weights at every fifth to tenth step. 64 steps hold six periods of ten, and
# the rest of a seventh is a small share.
_STEPS = 64
_TERMS = Wording(
    package="halfstep_jax",
    cure="Use a transform of halfstep_jax, or its round_stochastically as the last link.",
    rate="its rate",
    pairs=PAIRS,
    sums="sums of gradients are kept in 16 bits, and rounded at each summand",
    plain_norm="optax.global_norm",
    clip="clip_by_global_norm",
)


def diagnose(
    tx: optax.GradientTransformation, params: Tree, grads: Tree, state: Tree = None, **extra_args: object
) -> Diagnosis:
    """Report the updates that rounding would lose in the next step of any Optax transform, ours or not.

    Best after some steps of training, with their state. The transform takes three trial steps. The first has
    these gradients; two have gradients of zero and begin with a fresh state and a state of ones. The last two
    show the decay and the rates of moments. Not under `jax.jit`.

    An update counts as lost if it is not zero and `optax.apply_updates` leaves the weight where it is.
    Stochastic rounding moves few weights too, but by the right amount on average. `split_params` and
    `keep_master_params` add the rounding error later. So these three lose no updates. `compensate` loses
    updates below 2^-18 of a weight. Float32 weights lose nothing.

    The link that stores the weights must be the last. If a link behind it, or a wrapper, changes its updates,
    the first advice is the sentence of `check_chain`. The share lost is then that of movement: 64 steps from
    a fresh state, beside the same steps of float32 weights.

    Args:
        tx: the transform that trains.
        params: the weights. Of `optax.lookahead` these, or its `LookaheadParams`.
        grads: of the next step.
        state: of `tx`; None for a fresh one.
        extra_args: further arguments of `tx.update`, such as `value`.

    Raises:
        TypeError: if a weight is not float32, bfloat16, float16 or float64.

    Example:
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> diagnose(optax.adamw(1e-5), params, params).updates_lost
        1.0

    Source: ours.
    """
    check_params(_FUNCTION, params)
    params = as_stepped(tx, params)
    fault = chain_fault(tx, params, extra_args)
    tx = _with_extra_args(tx, extra_args)
    if state is None:
        state = tx.init(params)
    check_tags(_FUNCTION, jax.eval_shape(tx.init, params), state)
    changed = fault.leaves if fault else frozenset()
    stored = weights_that_links_store(tx, params) - changed
    zeros = jax.tree.map(jnp.zeros_like, grads)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    lost = _lost(params, updates, stored) | _lost_movement(tx, params, grads, changed)
    compensated = {} if fault else _lost_by_compensation(tx, params, grads, state)
    decay = _decay(tx, params, zeros)
    decays = any(bool((u != 0).any()) for u in jax.tree.leaves(decay))
    return diagnosis_of(
        _TERMS,
        fault=fault.advice if fault else advice_on_nan(tx, small(params, 0.05), small(grads, 1.0), {}),
        updates={name: x for name, x in lost.items() if name not in compensated},
        compensated=compensated,
        decay=_lost(params, decay, stored).values() if decays else None,
        moments=diagnose_moments(tx, params, zeros, state),
        sums_rounded=_sums_rounded(state),
        norm=float(global_norm(jax.tree.leaves(grads), exact=False)),
        plain_norm=float(optax.tree.norm(grads)),
        nonfinite={"weights": _nonfinite(params), "gradients": _nonfinite(grads)}
        | nonfinite_moments(tx, params, state),
        largest=max((float(jnp.abs(g).max()) for g in jax.tree.leaves(grads) if g.size), default=0.0),
        outside=_outside(tx, params, grads),
    )


def _with_extra_args(tx: optax.GradientTransformation, extra_args: Arguments) -> optax.GradientTransformation:
    """Return a transform with an update that receives extra arguments at every call."""
    if not extra_args:
        return tx
    update = optax.with_extra_args_support(tx).update
    return tx._replace(update=functools.partial(update, **extra_args))


def _outside(tx: optax.GradientTransformation, params, grads) -> dict[str, dict[str, Ends]]:
    """Return by format and name how many gradients are outside of the range of their second moment."""
    named, outside = dict(named_leaves(grads)), {}
    for row in describe(tx, params).arrays:
        if row.format in RANGES and row.leaf in named:
            outside.setdefault(row.format, {})[row.leaf] = count_outside(named[row.leaf], row.format)
    return outside


def _nonfinite(tree) -> Count:
    """Return the number of infinite or NaN elements, and of all elements."""
    leaves = jax.tree.leaves(tree)
    return sum(int((~jnp.isfinite(x)).sum()) for x in leaves), sum(x.size for x in leaves)


def _decay(tx: optax.GradientTransformation, params, zeros):
    """Return the decay: the updates for zero gradients, or zeros.

    A movement of weights of zero in a first step, as by averages that do not start at zero, is no decay.
    """
    first = jax.jit(lambda p: tx.update(zeros, tx.init(p), p)[0])
    decayed, other = first(params), first(jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(lambda u, v: jnp.where(u == v, jnp.zeros_like(u), u), decayed, other)


def _lost(params, updates, stored: Collection[str]) -> dict[str, Count]:
    """Return for every 16-bit weight how many elements with an update do not move."""
    us, after = (jax.tree.leaves(tree) for tree in (updates, optax.apply_updates(params, updates)))
    counts = {}
    for (name, p), u, new in zip(named_leaves(params), us, after, strict=True):
        if p.dtype in NARROW:
            moved = u != 0
            counts[name] = (
                (0, p.size) if name in stored else (int((moved & (new == p)).sum()), int(moved.sum()))
            )
    return counts


def _lost_movement(
    tx: optax.GradientTransformation, params, grads, names: Collection[str]
) -> dict[str, Count]:
    """Return the lost share of each weight's movement, as a number of its elements.

    Weights begin with a last bit of 0. Half a gap, which chains like `scale(0.5)` leave of an update, rounds
    to even: it moves odd weights once, and even ones never.
    """
    if not names:
        return {}
    even = jax.tree.map(lambda p: _even(p) if p.dtype in NARROW else p, params)
    moved = _movement(tx, even, grads)
    due = _movement(tx, jax.tree.map(lambda p: p.astype(jnp.float32), even), grads)
    counts = {}
    for name, p in named_leaves(params):
        if name in names:
            arrived, whole = (moved[name] * jnp.sign(due[name])).sum(), jnp.abs(due[name]).sum()
            share = 1 - float(arrived / whole) if whole > 0 else 0.0
            counts[name] = round(p.size * min(max(share, 0.0), 1.0)), p.size
    return counts


def _movement(tx: optax.GradientTransformation, params, grads) -> dict[str, jax.Array]:
    """Return the movement of every weight over steps with the same gradients, in float32."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    after, state = params, tx.init(params)
    for _ in range(_STEPS):
        after, state = step(after, state)
    pairs = zip(named_leaves(params), jax.tree.leaves(after), strict=True)
    return {name: q.astype(jnp.float32) - p.astype(jnp.float32) for (name, p), q in pairs}


def _even(p: jax.Array) -> jax.Array:
    """Return weights of 16 bits with a last bit of 0."""
    bits = jax.lax.bitcast_convert_type(p, jnp.uint16) & jnp.uint16(0xFFFE)
    return jax.lax.bitcast_convert_type(bits, p.dtype)


def _lost_by_compensation(tx: optax.GradientTransformation, params, grads, state) -> dict[str, Count]:
    """Return how many updates Kahan's sum loses: updates below 2^-18 of a weight (contract P4)."""
    watched, weights = WatchedUpdates(), dict(named_leaves(params))
    with watching(watched):
        tx.update(grads, state, params)
    counts = {}
    for name in (name for name, link in watched.by.items() if link == Compensate.name and name in weights):
        size, most = jnp.abs(watched.arrived[name]), jnp.abs(weights[name].astype(jnp.float32))
        counts[name] = int(((size > 0) & (size < 2.0**-18 * most)).sum()), int((size > 0).sum())
    return counts


def _sums_rounded(state) -> float:
    """Return the share of gradient sums in 16 bits that are not rounded stochastically."""
    kept: list[tuple[bool, jax.Array]] = []
    nodes = jax.tree.leaves(state, is_leaf=lambda x: any(hasattr(x, name) for name in SUMS))
    for node in nodes:
        sums = [getattr(node, name) for name in SUMS if hasattr(node, name)]
        plain = not isinstance(node, AccumulateGradientsState)
        kept += [(plain and x.dtype in NARROW, x) for x in jax.tree.leaves(sums)]
    return sum(x.size for rounded, x in kept if rounded) / max(sum(x.size for _, x in kept), 1)
