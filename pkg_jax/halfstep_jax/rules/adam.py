"""The Adam update rule as an Optax transform, composed of moments, storage and random words.

Contract: section A.
"""

from typing import Literal, NamedTuple

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.adam import ScaleByAdam
from halfstep.rules.named import ADAM, ADAMW
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.rule import state_of
from halfstep_jax.rules.named import named_transform
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import transform_of


@state_of(ScaleByAdam)
class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        mu: codes of the first moments, in the tree of the params.
        nu: codes of the second moments, likewise.
        mu_scale: scales by the names of the leaves that have one. If no leaf is large enough for a scale, a
            byte without meaning; if the format has no scales, `optax.EmptyState()`.
        nu_scale: scales of `nu`, likewise.
        formats: if `mu` or `nu` are codes, a scalar with a key that names their formats, such as
            "mu_relative_mulaw8-nu_uroot4_e4m4"; otherwise `optax.EmptyState()`.
    """

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    mu_scale: Tree = optax.EmptyState()
    nu_scale: Tree = optax.EmptyState()
    formats: Tree = optax.EmptyState()


scale_by_adam = transform_of(ScaleByAdam)


@takes_recipe(ADAM.moments)
def adam(  # noqa: D417 (the others are its links')
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: StateDType | None = None,
    *,
    nu_dtype: StateDType | None = None,
    mu_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | Literal["feedback"] | None = None,
    nesterov: bool = False,
    peak_lr: jax.typing.ArrayLike | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Adam for weights in bfloat16, float16 or float32.

    Chains `scale_by_adam`, `scale_by_learning_rate` and the weight storage, by default
    `round_stochastically`. Rounds as these do.

    Arguments are as in `scale_by_adam`, and:

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule.
        recipe: the name of one of `recipes`, for `mu_dtype`, `nu_dtype` and `param_storage` where they are
            not given.
        param_storage: how 16-bit weights are stored; None: as the recipe has it, else "stochastic".
            "stochastic" rounds them stochastically; "nearest" lets `optax.apply_updates` round them, which
            drops small updates; "compensated" keeps the lost part (see `compensate`). "split8" and "split16"
            keep further bits (see `split_params`), and "master" keeps a float32 copy (see
            `keep_master_params`). Under these three the links see float32 weights, and moments are float32 by
            default. "feedback" rounds stochastically too, and adds the rounding error to the first moment,
            from which later steps add it. It takes no byte more (contract A21, P9). It takes no b1 of 0 and
            no one_pass.
        peak_lr: the largest learning rate of the run, for "feedback" alone. Schedules and numbers have it. A
            rate that is an array, as `optax.inject_hyperparams` makes it, needs it: nothing is fed back
            without.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform. Put it last, and wrap transforms that scale or average updates in `store_params`.
        Its updates are float32.

    Raises:
        TypeError: if one of the links raises it.
        ValueError: likewise, or if `param_storage` is not a weight storage.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = adam(1e-3)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jax.grad(lambda p: (p**2).sum())(params), state, params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_adam`; the order of the links is contract A6.
    """
    return named_transform(
        ADAM, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype,
        nu_dtype=nu_dtype, mu_rounding=mu_rounding, nu_rounding=nu_rounding, recipe=recipe,
        param_storage=param_storage, nesterov=nesterov, peak_lr=peak_lr, seed=seed,
    )  # fmt: skip


@takes_recipe(ADAMW.moments)
def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: StateDType | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask = None,
    *,
    nu_dtype: StateDType | None = None,
    mu_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | Literal["feedback", "int8"] | None = None,
    nesterov: bool = False,
    cautious: bool = False,
    peak_lr: jax.typing.ArrayLike | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW for weights in bfloat16, float16 or float32: Adam with decoupled weight decay.

    Chains `scale_by_adam`, `add_decayed_weights`, `scale_by_learning_rate` and the weight storage, by default
    `round_stochastically`. The learning rate scales the decay too, as in Optax.

    Arguments, result and errors are as in `adam`, with `weight_decay`, `mask` and `cautious` of
    `add_decayed_weights`. `param_storage="int8"` is an experiment: the state keeps float32 weights in 8 bits,
    and rounding errors go into the first moment. `stored_params` reads them from there. It has neither
    `mask`, `nesterov` nor `cautious`, and "feedback" neither `mask` nor `cautious`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = adamw(optax.cosine_decay_schedule(1e-3, 100), weight_decay=0.1)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019; the order of the
    links is contract A6. Weights in 8 bits: contract A20 and P8, after M. Nikdan et al., "ECO: Quantized
    Training without Full-Precision Master Weights", arXiv:2601.22101.
    """
    return named_transform(
        ADAMW, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype,
        weight_decay=weight_decay, mask=mask, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
        nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, nesterov=nesterov,
        cautious=cautious, peak_lr=peak_lr, seed=seed,
    )  # fmt: skip
