"""LAMB's trust ratio as an Optax transform: one factor for each leaf, from the norms of weight and update.

Contract: section L.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from halfstep.rules import trust_ratio
from halfstep_jax.numbers.hyperparameters import check_order
from halfstep_jax.rule import checked
from halfstep_jax.transform import as_transform


def scale_by_trust_ratio(
    min_norm: jax.typing.ArrayLike = 0.0,
    trust_coefficient: jax.typing.ArrayLike = 1.0,
    eps: jax.typing.ArrayLike = 0.0,
    *,
    max_norm: jax.typing.ArrayLike | None = None,
    min_ratio: jax.typing.ArrayLike | None = None,
    max_ratio: jax.typing.ArrayLike | None = None,
    exact: bool = False,
    axis_names: Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale each leaf's update by the ratio of its weight's norm to its own.

    With |p| and |u| the norms of a leaf's weight and update, both at least `min_norm`, and |p| at most
    `max_norm`:

        ratio = (trust_coefficient |p|) / (|u| + eps), but 1 where |p| or |u| is 0
        u <- clamp(ratio, min_ratio, max_ratio) u

    In float32, whatever the dtypes. The norms neither underflow nor overflow as long as the norm itself is a
    float32 number. (Optax's norms are in the weights' dtype, and underflow to 0 if the elements are 1e-20.)
    Their sums are rounded in XLA's own order. Each operation after them is rounded once.

    Args:
        min_norm: a lower bound on both norms.
        trust_coefficient: a factor of the ratio.
        eps: added to the norm of the update.
        max_norm: an upper bound on the norm of the weight. With `min_norm`, LAMB's phi(z) = min(max(z,
            gamma_l), gamma_u); some published code has 10.
        min_ratio: a lower bound on the ratio, its 1 for zero norms included.
        max_ratio: an upper bound, likewise.
        exact: add integers, so that both norms have the same bits in any order, on any mesh, and in torch, as
            in `clip_by_global_norm`. It takes some 20 times the time of a norm on a CPU.
        axis_names: inside `jax.shard_map`, the mesh axes over which arrays are cut; () where every device has
            them whole. Of no effect elsewhere: under `jax.jit` a sharded array is a whole one.

    Returns:
        An Optax transform that needs `params`. Its updates are float32. Under `optax.masked` the other leaves
        keep their updates as they are.

    Errors are those of `scale_by_adam`, and ValueError for a lower bound above its upper bound, without
    `params`, and inside `jax.shard_map` without `axis_names`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_trust_ratio()
        >>> params = {"w": jnp.array([3.0, 4.0], jnp.bfloat16)}
        >>> updates, _ = tx.update({"w": jnp.array([0.0, 0.5])}, tx.init(params), params)
        >>> print(updates["w"])
        [0. 5.]

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, arXiv:1904.00962, algorithm 2; arguments as in `optax.scale_by_trust_ratio` (contract L2).
    """
    axis_names = None if axis_names is None else tuple(axis_names)
    return _transform(ScaleByTrustRatio(**locals()))


def scale_by_tempered_trust_ratio(
    learning_rate: optax.ScalarOrSchedule,
    trust_power: jax.typing.ArrayLike,
    *,
    max_norm: jax.typing.ArrayLike | None = None,
    exact: bool = False,
    axis_names: Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale each leaf's update by a power of its trust ratio, relative to the learning rate: for `lamb16`.

        ratio = clamp((((1e-3 / learning_rate) |p|) / |u|)^trust_power, 0, 2), but 1 where |p| or |u| is 0

    In float32, each operation rounded once, and the power to within units in the last place. `learning_rate`
    is the learning rate of the next link, and `trust_power` a number in (0, 1). The other arguments, result
    and errors are those of `scale_by_trust_ratio`.

    Source: the ratio of LAMB16's published code, of norms in place of its own measure (contract L4).
    """
    axis_names = None if axis_names is None else tuple(axis_names)
    return as_transform(ScaleByTemperedTrustRatio(**locals()))


class ScaleByTrustRatio(trust_ratio.ScaleByTrustRatio):
    """The rule of `scale_by_trust_ratio`: arrays may be cut over axes of a mesh."""

    axis_names: Any = None


class ScaleByTemperedTrustRatio(trust_ratio.ScaleByTemperedTrustRatio):
    """The rule of `scale_by_tempered_trust_ratio`, likewise."""

    name = "lamb16"

    axis_names: Any = None


def _transform(rule: trust_ratio.TrustRatio) -> optax.GradientTransformationExtraArgs:
    """Return the transform of a rule whose bounds are in order."""
    known = checked(rule)
    for kind in ("norm", "ratio"):
        names = f"min_{kind}", f"max_{kind}"
        if all(hasattr(known, name) for name in names):
            check_order(rule.name, names[0], getattr(known, names[0]), names[1], getattr(known, names[1]))
    return as_transform(rule)
