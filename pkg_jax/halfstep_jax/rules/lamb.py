"""LAMB as a whole optimizer, and LAMB16: the order of their links. No arithmetic.

Contract: L3, L4. The aim of LAMB16, and the parts that are kept: `docs/lamb16.md`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import optax

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.named import LAMB, LAMB16
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.rules.named import named_transform
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType, scaled

LAMB16_MU = scaled("float8_e4m3fn", 128)
LAMB16_NU = scaled("ufloat8_e5m3", 128)


@takes_recipe(LAMB.moments)
def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: StateDType | None = None,
    *,
    nu_dtype: StateDType | None = None,
    mu_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    bias_correction: bool = True,
    max_norm: jax.typing.ArrayLike | None = 10.0,
    exact: bool = False,
    axis_names: Sequence[str] | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """LAMB for weights in bfloat16, float16 or float32: Adam, with a learning rate for each leaf.

    Chains `scale_by_adam`, `add_decayed_weights`, `scale_by_trust_ratio`, `scale_by_learning_rate` and the
    weight storage, by default `round_stochastically`. In float32 throughout, and with `max_norm=None`, it is
    `optax.lamb` to within rounding. A step moves a leaf by about the share `learning_rate` of its norm, and
    the norm is taken of the update with its decay. `mu_rounding="feedback"`, which recipes have, is
    "stochastic" here: the norm would count fed-back errors too.

    Arguments, result and errors are as in `adamw`, with `max_norm`, `exact` and `axis_names` of
    `scale_by_trust_ratio`. Without `max_norm`, steps at a constant rate grow with the weights; None is no
    bound, as `optax.lamb` has it. `bias_correction` is present in v1 and the final paper, absent in v3;
    without decay and `eps` the ratio cancels it up to rounding. Under "split8", "split16" and "master" norms
    too are taken of the float32 weights.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(4)
        >>> tx = lamb(0.5)
        >>> updates, _ = tx.update(jnp.ones(4), tx.init(params), params)
        >>> print(optax.apply_updates(params, updates))
        [0.5 0.5 0.5 0.5]

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, algorithm 2; arXiv:1904.00962, v1 and v3 for `bias_correction` (contract L3).
    """
    return named_transform(
        LAMB, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root,
        weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
        nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, bias_correction=bias_correction,
        max_norm=max_norm, exact=exact, axis_names=axis_names, seed=seed,
    )  # fmt: skip


@takes_recipe(LAMB16.moments)
def lamb16(  # noqa: D417 (the others are its links')
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: StateDType | None = LAMB16_MU,
    *,
    nu_dtype: StateDType | None = LAMB16_NU,
    mu_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    bias_correction: bool = True,
    max_norm: jax.typing.ArrayLike | None = 10.0,
    trust_power: jax.typing.ArrayLike | None = 0.382,
    exact: bool = False,
    axis_names: Sequence[str] | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """LAMB with 16 bits of state per parameter: LAMB16's goal, in formats that preserve the moments.

    `lamb` with 2.02 bytes of state per parameter, and with a power of its trust ratio:

        ratio = clamp((((1e-3 / learning_rate) |p|) / |u|)^trust_power, 0, 2), but 1 where |p| or |u| is 0

    so that a step is proportional to learning_rate^(1 - trust_power). `docs/lamb16.md` compares the formats
    with the published code.

    Arguments, result and errors are the same as for `lamb`. With `exact` the power still differs from torch's
    by ulps, but for None.

    Args:
        trust_power: a number in (0, 1), by default as in the published code, or None for LAMB's own ratio.
            Not 1: the learning rate would cancel, and a schedule do nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> state = lamb16(1e-2).init(params)
        >>> optax.tree.get(state, "mu")["w"].dtype, optax.tree.get(state, "nu_scale")["w"].shape
        (dtype(float8_e4m3fn), (64, 1))

    Source: vxst, "LAMB16", 2024, https://github.com/vxst/LAMB16, for the aim and the ratio; LAMB as in `lamb`
        (contract L4).
    """
    named = LAMB16 if trust_power is not None else dataclasses.replace(LAMB, alias="lamb16")
    return named_transform(
        named, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root,
        weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
        nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, bias_correction=bias_correction,
        max_norm=max_norm, trust_power=trust_power, exact=exact, axis_names=axis_names, seed=seed,
    )  # fmt: skip
