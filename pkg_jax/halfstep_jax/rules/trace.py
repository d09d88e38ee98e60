"""Momentum as an Optax transform. Contract: A10."""

from typing import Literal, NamedTuple

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.named import SGD
from halfstep.rules.trace import Trace
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import FED_BACK, ParamStorage
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.rule import state_of
from halfstep_jax.rules.named import named_transform
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import transform_of


@state_of(Trace)
class TraceState(NamedTuple):
    """State of `trace`; its fields are as in `ScaleByAdamState`."""

    count: jax.Array
    seed: jax.Array
    trace: optax.Updates
    trace_scale: Tree = optax.EmptyState()
    formats: Tree = optax.EmptyState()


trace = transform_of(Trace)


@takes_recipe(SGD.moments)
def sgd(  # noqa: D417 (the others are its links')
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
    accumulator_dtype: StateDType | None = None,
    *,
    rounding: Rounding = "auto",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | Literal["feedback"] | None = None,
    peak_lr: jax.typing.ArrayLike | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Gradient descent for weights in bfloat16, float16 or float32, with momentum or without.

    Chains `trace`, unless `momentum` is None or 0, `scale_by_learning_rate` and the weight storage, by
    default `round_stochastically`. The other arguments are as in the links; `param_storage`, `seed`,
    result and errors are as in `adam`. "feedback" needs a momentum: rounding errors of weights
    are added to the sum (contract A23).

    Args:
        momentum: the decay of `trace`; None or 0: none, and no state.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = sgd(0.5, momentum=0.9)
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).tolist()
        [0.5, 0.5, 0.5]

    Source: as `trace`; the order of the links is contract A6.
    """
    none = momentum is None or (isinstance(momentum, int | float) and momentum == 0)
    # "feedback" needs a momentum, and its error names the value.
    sum_of_updates = {} if none and param_storage != FED_BACK else {"momentum": momentum}
    return named_transform(
        SGD, learning_rate=learning_rate, **sum_of_updates, nesterov=nesterov,
        accumulator_dtype=accumulator_dtype, rounding=rounding, recipe=recipe, param_storage=param_storage,
        peak_lr=peak_lr, seed=seed,
    )  # fmt: skip
