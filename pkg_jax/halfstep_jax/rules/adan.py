"""The Adan update rule as an Optax transform, and `adan` as an optimizer. Contract: A11."""

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.adan import ScaleByAdan
from halfstep.rules.named import ADAN
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.rules.named import named_transform
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import transform_of

scale_by_adan = transform_of(ScaleByAdan)


@takes_recipe(ADAN.moments)
def adan(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.98,
    b2: jax.typing.ArrayLike = 0.92,
    b3: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: StateDType | None = None,
    diff_dtype: StateDType | None = None,
    nu_dtype: StateDType | None = None,
    grad_dtype: StateDType | None = None,
    mu_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Adan for weights in bfloat16, float16 or float32: Adam that looks ahead, with decoupled decay.

    Chains `scale_by_adan`, `add_decayed_weights`, `scale_by_learning_rate` and the weight storage, by default
    `round_stochastically`. Arguments are as in the links, and `param_storage`, `seed`, result and errors
    as in `adam`. It is the paper's Adan, with the decay of the authors' code under `no_prox=True`;
    `optax.adan` has 1 - b2 instead of b2, and an `eps_root`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = adan(1e-3, weight_decay=0.02)
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_adan`; the order of the links is contract A6.
    """
    return named_transform(
        ADAN, learning_rate=learning_rate, b1=b1, b2=b2, b3=b3, eps=eps, weight_decay=weight_decay, mask=mask,
        mu_dtype=mu_dtype, diff_dtype=diff_dtype, nu_dtype=nu_dtype, grad_dtype=grad_dtype,
        mu_rounding=mu_rounding, nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage,
        seed=seed,
    )  # fmt: skip
