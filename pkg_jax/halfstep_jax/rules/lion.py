"""The Lion update rule as an Optax transform. Contract: A9."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from halfstep.recipes import takes_recipe
from halfstep.rules import lion as lion_rule
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.rules.weight_decay import add_decayed_weights
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import as_transform
from halfstep_jax.weights.weight_storage import with_param_storage


class ScaleByLionState(NamedTuple):
    """State of `scale_by_lion`; its fields are as in `ScaleByAdamState`."""

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    mu_scale: Any = optax.EmptyState()


@takes_recipe
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

    `b1` is the rate of the average whose sign is taken, `b2` of the average that is kept, in a `mu_dtype`
    with a sign. The other arguments, result and errors are those of `scale_by_adam`.

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
    return as_transform(ScaleByLion(**locals()))


@takes_recipe
def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    mu_dtype: StateDType | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    mu_rounding: str = "auto",
    recipe: str | None = None,
    param_storage: str = "stochastic",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lion for weights in bfloat16, float16 or float32: the sign of an average, with decoupled decay.

    Chains `scale_by_lion`, `add_decayed_weights`, `scale_by_learning_rate` and the weight storage, by default
    `round_stochastically`. Arguments are those of the links, and `param_storage`, `seed`, result and errors
    those of `adam`.

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
