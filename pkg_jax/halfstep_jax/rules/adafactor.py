"""Adafactor's links as Optax transforms, and `adafactor` as an optimizer. Contract: A18, A19."""

import jax
import numpy as np
import optax

from halfstep.rules.adafactor import ClipByBlockRms, ScaleByFactoredRms, ScaleByParamBlockRms
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.numbers.hyperparameters import as_float32, check_static
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.rules.trace import trace
from halfstep_jax.rules.weight_decay import Mask, add_decayed_weights
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import transform_of
from halfstep_jax.weights.weight_storage import with_param_storage

scale_by_factored_rms = transform_of(ScaleByFactoredRms)
clip_by_block_rms = transform_of(ClipByBlockRms)
scale_by_param_block_rms = transform_of(ScaleByParamBlockRms)


def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: jax.typing.ArrayLike = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    momentum: jax.typing.ArrayLike | None = None,
    dtype_momentum: StateDType | None = "float32",
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    eps: jax.typing.ArrayLike = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask = None,
    *,
    nu_dtype: StateDType | None = None,
    nu_rounding: Rounding = "stochastic",
    momentum_rounding: Rounding = "auto",
    param_storage: ParamStorage = "stochastic",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Adafactor, with a row and a column of each matrix as second moment, for weights in 16 bits.

    Chains `scale_by_factored_rms`, `clip_by_block_rms`, `scale_by_learning_rate`, `scale_by_param_block_rms`,
    momentum, absolute decay and the weight storage, by default `round_stochastically`. In float32 throughout
    it is `optax.adafactor` to within rounding. Momentum is `trace` of (1 - momentum) u: an average.

    Args:
        learning_rate: relative to the root mean square of each weight; None: 1. The paper's is the schedule
            `lambda count: jnp.minimum(1e-2, 1 / jnp.sqrt(count + 1.0))`.
        min_dim_size_to_factor: arrays with a shorter second axis are not factored.
        decay_rate: exponent of the decay of second moments, as in `scale_by_factored_rms`.
        decay_offset: `step_offset` of `scale_by_factored_rms`.
        multiply_by_parameter_scale: False makes the learning rate absolute.
        clipping_threshold: as in `clip_by_block_rms`; None: no bound.
        momentum: a decay rate; None: no momentum.
        dtype_momentum: how the momentum is stored, as `accumulator_dtype` of `trace`.
        weight_decay_rate: of decay that the learning rate does not scale; None: none.
        eps: `epsilon` of `scale_by_factored_rms`.
        factored: False keeps a second moment for each weight.
        weight_decay_mask: as `mask` of `add_decayed_weights`.
        nu_dtype: format of second moments that are not factored, as in `adamw`.
        nu_rounding: rounding of these second moments, as in `adamw`.
        momentum_rounding: as `rounding` of `trace`.
        param_storage: as in `adamw`.
        seed: as in `adamw`.

    Returns:
        An Optax transform that needs `params`.

    Errors are as in the links.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((256, 512), jnp.bfloat16)}
        >>> state = adafactor(1e-2).init(params)
        >>> optax.tree.get(state, "nu_row")["w"].shape, optax.tree.get(state, "nu_col")["w"].shape
        ((256, 1), (1, 512))

    Source: as `scale_by_factored_rms`; arguments and the order of links as in `optax.adafactor`.
    """
    check_static("adafactor", locals(), ("min_dim_size_to_factor", "decay_offset"))
    links: list[optax.GradientTransformation] = [
        scale_by_factored_rms(
            factored, decay_rate, decay_offset, min_dim_size_to_factor, eps,
            nu_dtype=nu_dtype, nu_rounding=nu_rounding, seed=seed,
        )
    ]  # fmt: skip
    if clipping_threshold is not None:
        links.append(clip_by_block_rms(clipping_threshold))
    links.append(scale_by_learning_rate(1.0 if learning_rate is None else learning_rate))
    if multiply_by_parameter_scale:
        links.append(scale_by_param_block_rms())
    if momentum is not None:
        sum_of = trace(momentum, accumulator_dtype=dtype_momentum, rounding=momentum_rounding, seed=seed)
        share = np.float32(1) - as_float32("adafactor", "momentum", momentum)
        links += [scale_by_learning_rate(share, flip_sign=False), sum_of]
    if weight_decay_rate is not None:
        links.append(add_decayed_weights(weight_decay_rate, weight_decay_mask, absolute=True))
    return with_param_storage("adafactor", param_storage, links, seed)
