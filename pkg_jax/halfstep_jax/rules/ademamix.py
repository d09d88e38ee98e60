"""The AdEMAMix update rule as an Optax transform, and `ademamix` as an optimizer. Contract: A15."""

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.ademamix import ScaleByAdemamix
from halfstep.rules.named import ADEMAMIX
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.rules.named import named_transform
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import transform_of

scale_by_ademamix = transform_of(ScaleByAdemamix)


@takes_recipe(ADEMAMIX.moments)
def ademamix(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.9999,
    alpha: optax.ScalarOrSchedule = 5.0,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: StateDType | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    slow_dtype: StateDType | None = None,
    nu_dtype: StateDType | None = None,
    mu_rounding: Rounding = "auto",
    slow_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdEMAMix for weights in bfloat16, float16 or float32: Adam with a second, much slower average.

    Chains `scale_by_ademamix`, `add_decayed_weights`, `scale_by_learning_rate` and the weight storage, by
    default `round_stochastically`. Arguments are as in the links, in the order of
    `optax.contrib.ademamix`, and `param_storage`, `seed`, result and errors as in `adam`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = ademamix(1e-3, alpha=optax.linear_schedule(0.0, 5.0, 1000))
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_ademamix`; the order of the links is contract A6.
    """
    return named_transform(
        ADEMAMIX, learning_rate=learning_rate, b1=b1, b2=b2, b3=b3, alpha=alpha, eps=eps, eps_root=eps_root,
        mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask, slow_dtype=slow_dtype, nu_dtype=nu_dtype,
        mu_rounding=mu_rounding, slow_rounding=slow_rounding, nu_rounding=nu_rounding, recipe=recipe,
        param_storage=param_storage, seed=seed,
    )  # fmt: skip
