"""Momentum as an Optax transform. Contract: A10."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from halfstep_jax.leaves import check_params
from halfstep_jax.numbers.exact import arrived, hide
from halfstep_jax.numbers.hyperparameters import decay_rate
from halfstep_jax.numbers.random_words import LeafKey, Role
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import seed_words
from halfstep_jax.storage.formats import Encoded
from halfstep_jax.storage.stored_moment import StoredMoment, update_moments


class TraceState(NamedTuple):
    """State of `trace`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        trace: codes of the sums, in the tree of the params.
        trace_scale: scales of `trace`, in the same tree; one byte that means nothing where a leaf has none,
            and `optax.EmptyState()` where no leaf can have any.
    """

    count: jax.Array
    seed: jax.Array
    trace: optax.Updates
    trace_scale: Any = optax.EmptyState()


def trace(
    decay, nesterov: bool = False, accumulator_dtype=None, *, rounding: str = "auto", seed=0
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by their decaying sum, kept in 16 bits or fewer, or in 32: momentum.

        t <- store(g + (decay t))
        u = t, as it was stored; with `nesterov` g + (decay t)

    All in float32, whatever the dtype of `g`, each operation rounded once. Rounds t to its dtype, once.

    Args:
        decay: of the sum.
        nesterov: look one step ahead.
        accumulator_dtype: "float32", "bfloat16", "float16" or a signed format (`scaled`, `codebook`); None:
            bfloat16 for bfloat16 params, else float32.
        rounding: "stochastic", "nearest", "auto" (nearest, unless that would freeze the sum: stochastic
            then, as where `decay` is an array), or "nearest_unchecked" (nearest even so).
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform. Its updates are float32; `params` may be left out.

    Raises:
        TypeError: if an argument is of the wrong type, or an array of another dtype than float32; from `init`
            and `update`, if a leaf is not float32, bfloat16 or float16.
        ValueError: if an argument is out of range, or the sum would freeze; from `update`, if trees or
            shapes differ.

    Example:
        >>> params = {"w": jnp.zeros(1, jnp.bfloat16)}
        >>> tx = trace(0.5)
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     updates, state = tx.update({"w": jnp.ones(1)}, state)
        >>> updates["w"].tolist()
        [1.75]

    Source: B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; I. Sutskever
    et al., "On the importance of initialization and momentum in deep learning", ICML 2013, for `nesterov`.
    The form is Optax's, the storage ours (contract A10, F).
    """
    function = "trace"
    decay = decay_rate(function, "decay", decay)
    stored = StoredMoment(
        function,
        "trace",
        accumulator_dtype,
        rounding,
        "decay",
        decay,
        Role.MU,
        dtype_name="accumulator_dtype",
        rounding_name="rounding",
    )
    rule = _Trace(decay, nesterov, stored)
    seed = seed_words(function, seed)

    def init(params):
        check_params(function, params)
        return TraceState(jnp.zeros([], jnp.int32), seed, *rule.stored.init(params))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        count, trees = next_count(state.count), [(state.trace, state.trace_scale)]
        us, (new,) = update_moments(function, [rule.stored], updates, trees, state.seed, count, rule.step)
        return us, TraceState(count, state.seed, *new)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """The rule on one leaf. `decay` is float32."""

    decay: Any
    nesterov: bool
    stored: StoredMoment

    def step(self, key: LeafKey, g: jax.Array, old: Encoded) -> tuple[jax.Array, Encoded]:
        """Return the update and the new stored sum."""
        zero = key.zero()
        g = arrived(g, zero)
        words = functools.partial(key.words, shape=g.shape)
        new = self.stored.encode(old, self._sum(g, self.stored.decode(old), zero), words)
        # From here on the sum is what a checkpoint would hold.
        u = self.stored.decode(new)
        return self._sum(g, u, zero) if self.nesterov else u, new

    def _sum(self, g: jax.Array, total: jax.Array, zero: jax.Array) -> jax.Array:
        return g + hide(jnp.asarray(self.decay, jnp.float32) * total, zero)
