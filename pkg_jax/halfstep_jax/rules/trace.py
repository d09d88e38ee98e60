"""Momentum as an Optax transform. Contract: A10."""

from typing import Any, NamedTuple

import jax
import optax

from halfstep.rules import trace as trace_rule
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import as_transform
from halfstep_jax.weights.weight_storage import with_param_storage


class TraceState(NamedTuple):
    """State of `trace`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        trace: codes of the sums, in the tree of the params.
        trace_scale: scales of `trace`, by the names of the leaves that have one; one byte that means nothing
            where none is large enough for a scale, and `optax.EmptyState()` where none can have one.
    """

    count: jax.Array
    seed: jax.Array
    trace: optax.Updates
    trace_scale: Any = optax.EmptyState()


def trace(
    decay: jax.typing.ArrayLike,
    nesterov: bool = False,
    accumulator_dtype: StateDType | None = None,
    *,
    rounding: str = "auto",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by their decaying sum, kept in 4 to 32 bits: momentum.

        t <- store(g + (decay t))
        u = t, as it was stored; with `nesterov` g + (decay t)

    All in float32, whatever the dtype of `g`, each operation rounded once. Rounds t to its dtype, once.

    Args:
        decay: factor on the sum at each step.
        nesterov: look one step ahead.
        accumulator_dtype: "float32", "bfloat16", "float16" or a signed format (`scaled`, `codebook`); None:
            bfloat16 for bfloat16 params, else float32.
        rounding: "stochastic", "nearest", "nearest_unchecked" (nearest even where that
            freezes it) or "auto" (nearest where that leaves an average within a thousandth of its truth, else
            stochastic, as where `decay` is an array).
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform. Its updates are float32; `params` may be left out.

    Raises:
        TypeError: if an argument is of the wrong type, or an array of another dtype than float32; from `init`
            and `update`, if a leaf is not float32, bfloat16, float16 or float64.
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


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
    accumulator_dtype: StateDType | None = None,
    *,
    rounding: str = "auto",
    param_storage: str = "stochastic",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Gradient descent for weights in bfloat16, float16 or float32, with momentum or without.

    Chains `trace`, unless `momentum` is None or 0, `scale_by_learning_rate` and the weight storage, by
    default `round_stochastically`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule.
        momentum: decay of the sum of gradients; None or 0 keeps none.
        nesterov: as in `trace`.
        accumulator_dtype: of the sum, as in `trace`.
        rounding: of the sum, as in `trace`.
        param_storage: how 16-bit weights are stored, as in `adam`.
        seed: of the random words, for the sum and the weights alike.

    Returns:
        An Optax transform, the last before `optax.apply_updates`: what scales or averages its updates stands
        inside of `store_params`. Its updates are float32.

    Raises:
        TypeError: whatever the transforms raise.
        ValueError: whatever the transforms raise, or if `param_storage` is not a weight storage.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = sgd(0.5, momentum=0.9)
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).tolist()
        [0.5, 0.5, 0.5]

    Source: as `trace`; the order of the links is contract A6.
    """
    links = [scale_by_learning_rate(learning_rate)]
    constant_zero = isinstance(momentum, int | float) and momentum == 0
    if momentum is not None and not constant_zero:
        links.insert(0, trace(momentum, nesterov, accumulator_dtype, rounding=rounding, seed=seed))
    return with_param_storage("sgd", param_storage, links, seed)


class Trace(trace_rule.Trace):
    """The rule of `trace`, with a state of its own type."""

    State = TraceState
