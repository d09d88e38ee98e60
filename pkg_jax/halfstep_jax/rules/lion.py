"""The Lion update rule as an Optax transform. Contract: A9."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from halfstep.rules import lion as lion_rule
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.rules.weight_decay import add_decayed_weights
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import as_transform
from halfstep_jax.weights.weight_storage import with_param_storage


class ScaleByLionState(NamedTuple):
    """State of `scale_by_lion`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        mu: codes of the averages, in the tree of the params.
        mu_scale: scales of `mu`, by the names of the leaves that have one; one byte that means nothing
            where none is large enough for a scale, and `optax.EmptyState()` where none can have one.
    """

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    mu_scale: Any = optax.EmptyState()


def scale_by_lion(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    mu_dtype: StateDType | None = None,
    *,
    mu_rounding: str = "auto",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by the sign of their average, the average kept in 4 to 32 bits.

    With m the average as it was stored at the step before:

        u = sign((b1 m) + ((1 - b1) g))
        m <- store((b2 m) + ((1 - b2) g))

    All in float32, whatever the dtype of `g`, each operation rounded once. Rounds m to its dtype, once. The
    sign is 1, -1, +0 for zero of either sign, and NaN for NaN.

    Args:
        b1: rate of the average whose sign is taken.
        b2: decay rate of the average that is kept.
        mu_dtype: "float32", "bfloat16", "float16" or a signed format (`scaled`, `codebook`); None: bfloat16
            for bfloat16 params, else float32.
        mu_rounding: "stochastic", "nearest", "nearest_unchecked" (nearest even where that
            freezes it) or "auto" (nearest where that leaves an average within a thousandth of its truth, else
            stochastic, as where `b2` is an array).
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform. Its updates are float32; `params` may be left out.

    Raises:
        TypeError: if an argument is of the wrong type, or an array of another dtype than float32; from `init`
            and `update`, if a leaf is not float32, bfloat16, float16 or float64.
        ValueError: if an argument is out of range, or the average would freeze; from `update`, if trees or
            shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.array([1.0, -2.0], jnp.bfloat16)}
        >>> tx = scale_by_lion()
        >>> updates, state = tx.update({"w": jnp.array([0.5, -0.5])}, tx.init(params))
        >>> updates["w"].tolist()
        [1.0, -1.0]

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2. The
    storage is ours (contract A9, F).
    """
    rule = ScaleByLion(b1=b1, b2=b2, mu_dtype=mu_dtype, mu_rounding=mu_rounding, seed=seed)
    return as_transform(rule)


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    mu_dtype: StateDType | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    mu_rounding: str = "auto",
    param_storage: str = "stochastic",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lion for weights in bfloat16, float16 or float32: the sign of an average, with decoupled decay.

    Chains `scale_by_lion`, `add_decayed_weights`, `scale_by_learning_rate` and the weight storage, by default
    `round_stochastically`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule. It scales the decay too.
        b1: rate of the average whose sign is taken.
        b2: decay rate of the average that is kept.
        mu_dtype: of that average: "float32", "bfloat16", "float16" or a signed format (`scaled`, `codebook`);
            None: bfloat16 for bfloat16 params, else float32.
        weight_decay: a number >= 0, a float32 scalar array, or a schedule.
        mask: which leaves decay, as in `add_decayed_weights`.
        mu_rounding: as in `scale_by_lion`.
        param_storage: how 16-bit weights are stored, as in `adam`.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, the last before `optax.apply_updates`: what scales or averages its updates stands
        inside of `store_params`. Its updates are float32.

    Raises:
        TypeError: whatever the transforms raise.
        ValueError: whatever the transforms raise, or if `param_storage` is not a weight storage.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = lion(1e-4, mu_dtype="float32")
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_lion`; the order of the links is contract A6.
    """
    links = [
        scale_by_lion(b1, b2, mu_dtype, mu_rounding=mu_rounding, seed=seed),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    ]
    return with_param_storage("lion", param_storage, links, seed)


class ScaleByLion(lion_rule.ScaleByLion):
    """The rule of `scale_by_lion`, with a state of its own type."""

    State = ScaleByLionState
