"""The Lion update rule as an Optax transform. Contract: A9."""

from typing import NamedTuple

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.lion import ScaleByLion
from halfstep.rules.named import LION
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.rule import state_of
from halfstep_jax.rules.named import named_transform
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import transform_of


@state_of(ScaleByLion)
class ScaleByLionState(NamedTuple):
    """State of `scale_by_lion`; its fields are as in `ScaleByAdamState`."""

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    mu_scale: Tree = optax.EmptyState()
    formats: Tree = optax.EmptyState()


scale_by_lion = transform_of(ScaleByLion)


@takes_recipe(LION.moments)
def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    mu_dtype: StateDType | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Mask = None,
    *,
    mu_rounding: Rounding = "auto",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    cautious: bool = False,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lion for weights in bfloat16, float16 or float32: the sign of an average, with decoupled decay.

    Chains `scale_by_lion`, `add_decayed_weights`, `scale_by_learning_rate` and the weight storage, by default
    `round_stochastically`. Arguments are as in the links, and `param_storage`, `seed`, result and errors
    as in `adam`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = lion(1e-4, mu_dtype="float32")
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_lion`; the order of the links is contract A6.
    """
    return named_transform(
        LION, learning_rate=learning_rate, b1=b1, b2=b2, mu_dtype=mu_dtype, weight_decay=weight_decay,
        mask=mask, mu_rounding=mu_rounding, recipe=recipe, param_storage=param_storage, cautious=cautious,
        seed=seed,
    )  # fmt: skip
