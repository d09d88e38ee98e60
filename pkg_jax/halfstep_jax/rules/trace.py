"""Momentum as an Optax transform. Contract: A10."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from halfstep_jax.numbers.exact import add_product
from halfstep_jax.rule import Rule, decay_rate, moment
from halfstep_jax.transform import as_transform


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
        >>> import jax.numpy as jnp
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
    rule = Trace(decay, nesterov, accumulator_dtype, rounding, seed)
    return as_transform(rule)


@dataclasses.dataclass(frozen=True)
class Trace(Rule):
    """The rule of `trace`."""

    name = "trace"
    State = TraceState

    decay: Any = decay_rate()
    nesterov: bool = False
    accumulator_dtype: Any = None
    rounding: str = "auto"
    seed: Any = 0
    trace = moment(rate="decay", dtype="accumulator_dtype", rounding="rounding")

    def update(self, g, p, n, moments, zero):
        """Return the sum as it is stored from now on, or one step ahead of it."""
        t = moments.trace.round(add_product(g, n.decay, moments.trace.value, zero))
        return add_product(g, n.decay, t, zero) if self.nesterov else t
