"""What a run loses while it trains: a few numbers every so many steps, measured on the device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from halfstep.description import WEIGHT
from halfstep.monitor import NUMBERS, checked_every, corner, row_of
from halfstep_jax.description import describe, leaf_at_end, weights_that_links_store
from halfstep_jax.leaves import named_leaves
from halfstep_jax.moment_probe import NARROW, PAIRS
from halfstep_jax.storage.ends import count_at_ends, moment_pairs
from halfstep_jax.weights.chain_check import chain_fault


class Monitor:
    """Measure every so many steps what rounding loses, of any Optax transform, of this package or not.

    Call `read` after every step, with what the step returned. Every `every`-th call returns the numbers as a
    flat dict of floats, for W&B, TensorBoard or a print; others return None, and do nothing. The numbers are
    computed where the arrays are, in one compiled program, and 24 bytes are transferred. The step itself is
    left alone: it may be compiled, donate its arguments, and be of any library.

    | entry | of the measured step |
    |---|---|
    | `step` | the number of the call |
    | `updates_lost` | share of the updates of 16-bit weights that move nothing |
    | `update_norm` | the norm of what the weights moved |
    | `weight_norm` | the norm of the weights |
    | `moments_at_smallest`, `moments_at_largest` | shares of second moments at the ends of their codes |
    | `nonfinite` | how many weights are infinite or NaN |

    The first two are estimates, from the first 16,384 elements of each weight. An update counts as lost if no
    link of this package stores its weight, the weight does not move, and its moments are not all zero. As
    `diagnose`, it takes the stochastic rounding of other libraries for a loss.

    What is wrong is said once in the log `halfstep_jax`, such as second moments at the ends of what
    `one_pass` holds.

    Args:
        tx: the transform that trains.
        every: how many steps lie between two that are measured.
        extra_args: what `tx.update` wants beside updates, state and params, such as `value`.

    Raises:
        ValueError: if `every` is no positive integer.

    Example:
        >>> tx = optax.adamw(1e-5)
        >>> monitor = Monitor(tx, every=2)
        >>> params = {"w": jnp.ones(64, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     row = monitor.read(params, state)
        >>> row["step"], row["updates_lost"], row["weight_norm"]
        (2.0, 1.0, 8.0)

    Source: ours.
    """

    def __init__(self, tx: optax.GradientTransformation, every: int = 100, **extra_args: Any):
        self.every = checked_every(every)
        self._tx, self._extra_args = tx, extra_args
        self._calls, self._before, self._measure = 0, None, None
        self._formats: dict[tuple[str, str], str] = {}

    def read(self, params: Any, state: Any) -> dict[str, float] | None:
        """Return the numbers of the step that was taken, at every `every`-th call; None at others.

        Args:
            params: the weights after the step.
            state: of `tx` after the step.
        """
        self._calls += 1
        row = None
        if self._before is not None:
            measure = self._measure or self._compiled(params)
            numbers = jax.device_get(measure(self._before, params, state)).tolist()
            kept = {text for (_, name), text in self._formats.items() if name in PAIRS}
            row = row_of("halfstep_jax", self._calls, numbers, next(iter(PAIRS)), kept)
            self._before = None
        if (self._calls + 1) % self.every == 0:
            self._before = _corners(params)
        return row

    def _compiled(self, params: Any) -> Any:
        fault = chain_fault(self._tx, params, self._extra_args)
        stored = weights_that_links_store(self._tx, params) - (fault.leaves if fault else frozenset())
        rows = describe(self._tx, params, **self._extra_args).arrays
        self._formats = {(row.leaf, row.name): row.format for row in rows if row.name != WEIGHT}
        self._measure = jax.jit(functools.partial(_measured, stored, self._formats))
        return self._measure


@jax.jit
def _corners(params) -> list[jax.Array]:
    """Return the first elements of each weight, copied: the next step may write in their place."""
    return [jnp.copy(p[corner(p.shape)]) for p in jax.tree.leaves(params)]


def _measured(stored: set[str], formats: dict[tuple[str, str], str], before, params, state) -> jax.Array:
    """Return the numbers of a step, in the order of `NUMBERS`, norms as squares."""
    moments = _moments_by_leaf(params, state)
    sums = [jnp.zeros(5)]
    for old, (name, p) in zip(before, named_leaves(params), strict=True):
        now, kept = p[corner(p.shape)], [x[corner(x.shape)] for x in moments[name]]
        due = functools.reduce(jnp.logical_or, [x != 0 for x in kept]) if kept else jnp.ones(now.shape, bool)
        counts = p.dtype in NARROW
        lost = due & (now == old) if counts and name not in stored else jnp.zeros(now.shape, bool)
        moved, scale = now.astype(jnp.float32) - old.astype(jnp.float32), p.size / max(now.size, 1)
        p32 = p.astype(jnp.float32)
        of_each = [lost, due & counts, moved**2, p32**2, ~jnp.isfinite(p32)]
        shares = jnp.array([scale, scale, scale, 1, 1], jnp.float32)
        sums.append(jnp.stack([x.sum(dtype=jnp.float32) for x in of_each]) * shares)
    lost, due, moved, weights, nonfinite = jnp.stack(sums).sum(0)
    second = list(moment_pairs(dict(named_leaves(state)), PAIRS))
    counts = [count_at_ends(formats.get((leaf, name), ""), x, other) for leaf, name, x, other in second]
    size = max(sum(x.size for _, _, x, _ in second), 1)
    ends = (jnp.asarray(sum(x), jnp.float32) / size for x in zip((0, 0), *counts, strict=True))
    numbers = jnp.stack([lost / jnp.maximum(due, 1), moved, weights, *ends, nonfinite])
    assert numbers.shape == (len(NUMBERS),)
    return numbers


def _moments_by_leaf(params, state) -> dict[str, list[jax.Array]]:
    """Return of every weight the arrays of floats in a state that are like it."""
    weights = dict(named_leaves(params))
    moments: dict[str, list[jax.Array]] = {name: [] for name in weights}
    for path, x in named_leaves(state):
        leaf = leaf_at_end(path, weights)
        shape = getattr(x, "shape", None)
        if leaf in weights and shape == weights[leaf].shape and jnp.issubdtype(x.dtype, jnp.floating):
            moments[leaf].append(x)
    return moments
