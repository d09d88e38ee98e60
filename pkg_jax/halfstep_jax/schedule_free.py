"""`schedule_free_adamw` as an alias, and the averaged weights of any schedule-free run. Contract: A17."""

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.named import SCHEDULE_FREE_ADAMW
from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.checkpoint.float32_weights import float32_params
from halfstep_jax.checkpoint.link_moments import decoded_moments
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.rules.named import named_transform
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType


def schedule_free_eval_params(state: Tree, params: Tree, tx: optax.GradientTransformation) -> Tree:
    """Return the averaged weights, in float32: the weights as precisely as they are known, less their lead.

    For evaluation and for export; training goes on with `params`. As `optax.contrib`'s function of this
    name, and with `tx`, which knows in which format the lead is kept. Decodes; rounds the difference alone.

    Args:
        state: of `tx`, which is `schedule_free_adamw` or has `scale_by_schedule_free` at any place.
        params: the weights of the run.
        tx: the transform. Weights that its link does not step, as in `optax.partition`, are not averaged.

    Raises:
        TypeError: if a leaf of `params` is not float32, bfloat16 or float16.
        ValueError: if `tx` has no `scale_by_schedule_free`, or `state` is not of `tx` and these params.

    Example:
        >>> import jax.numpy as jnp
        >>> from halfstep_jax import schedule_free_adamw
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = schedule_free_adamw(0.1, param_storage="split16")
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> averaged = schedule_free_eval_params(state, params, tx)
        >>> print(averaged["w"].round(3))  # the mean of 0.9 and 0.8
        [0.85 0.85]

    Source: A. Defazio et al., "The Road Less Scheduled", arXiv:2405.15682 (contract A17).
    """
    caller = "schedule_free_eval_params"
    leads = decoded_moments(caller, ScaleByScheduleFree.name, state, tx, params)
    if not leads and jax.tree.leaves(params):
        raise ValueError(
            f"{caller}: tx averages no weights. Pass schedule_free_adamw(...), or a chain with "
            "scale_by_schedule_free()."
        )
    weights = float32_params(params, state)
    averaged = [x - leads.get(("lead", name), 0) for name, x in named_leaves(weights)]
    return jax.tree.structure(weights).unflatten(averaged)


@takes_recipe(SCHEDULE_FREE_ADAMW.moments)
def schedule_free_adamw(
    learning_rate: optax.ScalarOrSchedule = 0.0025,
    warmup_steps: jax.typing.ArrayLike | None = None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    lead_dtype: StateDType | None = None,
    nu_dtype: StateDType | None = None,
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Schedule-free AdamW for weights in bfloat16, float16 or float32: no schedule, and no end to choose.

    Chains `scale_by_rms` with the bias correction of Adam, `add_decayed_weights`, `scale_by_learning_rate`,
    `scale_by_schedule_free` and the weight storage, by default `round_stochastically`. The state is as large
    as the state of `adamw`, and 16-bit weights keep the average too: evaluate `schedule_free_eval_params`.

    The first arguments are those of `optax.contrib.schedule_free_adamw`. Here the warm-up begins at
    learning_rate / warmup_steps, as in the paper; in Optax at 0. `mask` is that of `add_decayed_weights`,
    `lead_dtype` that of `scale_by_schedule_free`. Other arguments, result and errors are those of `adamw`.

    Example:
        >>> import jax.numpy as jnp
        >>> from halfstep_jax import schedule_free_eval_params
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = schedule_free_adamw(0.1, warmup_steps=2)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> schedule_free_eval_params(state, params, tx).dtype
        dtype('float32')

    Source: A. Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, algorithm 1; contract A16, A17.
    """
    return named_transform(
        SCHEDULE_FREE_ADAMW, learning_rate=learning_rate, warmup_steps=warmup_steps, b1=b1, b2=b2, eps=eps,
        weight_decay=weight_decay, mask=mask, lead_dtype=lead_dtype, nu_dtype=nu_dtype,
        nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, seed=seed,
    )  # fmt: skip
