"""LAMB's trust ratio as an Optax transform: one factor for each leaf, from the norms of weight and update.

Contract: section L.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from halfstep_jax.numbers.exact import opaque
from halfstep_jax.numbers.global_norm import global_norm
from halfstep_jax.numbers.hyperparameters import as_float32, as_nonnegative, check_order
from halfstep_jax.numbers.norms import check_axis_names, norm
from halfstep_jax.numbers.roots import divide
from halfstep_jax.rule import Rule, number, scalar_or_schedule
from halfstep_jax.transform import as_transform

TEMPERED_COEFFICIENT = np.float32(1e-3)
TEMPERED_MAX_RATIO = np.float32(2)


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

    In float32, whatever the dtypes. The norms neither underflow nor overflow while the norm itself is a
    float32 number (Optax's underflow to 0 where a weight's elements are 1e-20, and are in the weights'
    dtype); they are sums, rounded in XLA's own order. Each operation after them is rounded once.

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

    Raises:
        TypeError: if an argument is no number, or an array of another dtype than float32; from `update`, if
            a leaf is not float32, bfloat16, float16 or float64.
        ValueError: if one is negative, or a lower bound above its upper bound; from `update`, without
            `params`, inside `jax.shard_map` without `axis_names`, or if trees or shapes differ.

    Example:
        >>> tx = scale_by_trust_ratio()
        >>> params = {"w": jnp.array([3.0, 4.0], jnp.bfloat16)}
        >>> updates, _ = tx.update({"w": jnp.array([0.0, 0.5])}, tx.init(params), params)
        >>> print(updates["w"])
        [0. 5.]

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, arXiv:1904.00962, algorithm 2; arguments as in `optax.scale_by_trust_ratio` (contract L2).
    """
    caller = "scale_by_trust_ratio"
    rule = ScaleByTrustRatio(
        trust_coefficient=trust_coefficient,
        **_bounds(caller, "norm", min_norm, max_norm),
        eps=eps,
        **_bounds(caller, "ratio", min_ratio, max_ratio),
        exact=exact,
        axis_names=None if axis_names is None else tuple(axis_names),
    )
    return as_transform(rule)


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

    In float32, each operation rounded once, and the power to within units in the last place.

    Args:
        learning_rate: that of the link after this one: a number >= 0, a float32 scalar array, or a schedule.
        trust_power: a number in (0, 1).
        max_norm: as in `scale_by_trust_ratio`.
        exact: likewise.
        axis_names: likewise.

    Returns:
        An Optax transform that needs `params`. Its updates are float32.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if one is out of range; from `update`, without `params`, or if trees or shapes differ.

    Source: the ratio of LAMB16's published code, of norms in place of its own measure (contract L4).
    """
    rule = ScaleByTemperedTrustRatio(
        **_bounds("lamb16", "norm", 0.0, max_norm),
        max_ratio=TEMPERED_MAX_RATIO,
        power=_power("lamb16", trust_power),
        learning_rate=learning_rate,
        exact=exact,
        axis_names=None if axis_names is None else tuple(axis_names),
    )
    return as_transform(rule)


@dataclasses.dataclass(frozen=True)
class ScaleByTrustRatio(Rule):
    """The rule of `scale_by_trust_ratio`. By default bounds bound nothing.

    Attributes:
        trust_coefficient: of the weight's norm.
        min_norm: below it norms count as it.
        max_norm: above it the weight's norm counts as it.
        eps: added to the norm of the update.
        min_ratio: the ratio is at least this.
        max_ratio: and at most this.
        exact: norms are sums of integers.
        axis_names: of the axes over which arrays are cut.
    """

    name = "scale_by_trust_ratio"
    scope = "parameter"
    reads_params = "the link compares the norms of params and updates"

    trust_coefficient: Any = number(1.0)
    min_norm: Any = number(0.0)
    max_norm: Any = number(np.inf)
    eps: Any = number(0.0)
    min_ratio: Any = number(0.0)
    max_ratio: Any = number(np.inf)
    exact: bool = False
    axis_names: Any = None

    def update(self, g, p, n, moments, zero):
        """Return the update times the ratio of the norms."""
        check_axis_names(self.name, self.axis_names)
        p_norm, u_norm = (self._norm(x) for x in (p, g))
        return opaque(self.ratio(p_norm, u_norm, n) * g, zero)

    def _norm(self, x: jax.Array) -> jax.Array:
        if self.exact:
            return global_norm([x], exact=True, axis_names=self.axis_names)
        return norm(x, self.axis_names)

    def ratio(self, p_norm: jax.Array, u_norm: jax.Array, n) -> jax.Array:
        """Return the ratio in float32, given both norms (contract L2)."""
        p_norm = jnp.minimum(jnp.maximum(p_norm, n.min_norm), n.max_norm)
        u_norm = jnp.maximum(u_norm, n.min_norm)
        ratio = self.power_of(divide(n.trust_coefficient * p_norm, u_norm + n.eps), n)
        # Where a norm is 0 the quotient would freeze the leaf for ever.
        ratio = jnp.where((p_norm == 0) | (u_norm == 0), np.float32(1), ratio)
        return jnp.minimum(jnp.maximum(ratio, n.min_ratio), n.max_ratio)

    def power_of(self, quotient: jax.Array, n) -> jax.Array:
        """Return the quotient of the norms as it is."""
        return quotient


@dataclasses.dataclass(frozen=True)
class ScaleByTemperedTrustRatio(ScaleByTrustRatio):
    """The rule of `scale_by_tempered_trust_ratio`.

    Attributes:
        power: to which the quotient of the norms is raised.
        learning_rate: by which the trust coefficient is divided.
    """

    name = "lamb16"

    power: Any = number(1.0)
    learning_rate: Any = scalar_or_schedule(1.0)

    def numbers(self, h, count) -> dict[str, Any]:
        """Set the coefficient: 1e-3 / learning_rate."""
        return {"trust_coefficient": divide(TEMPERED_COEFFICIENT, jnp.asarray(h.learning_rate))}

    def power_of(self, quotient: jax.Array, n) -> jax.Array:
        """Return quotient^power."""
        return jnp.power(quotient, n.power)


def _bounds(caller: str, name: str, low, high) -> dict[str, Any]:
    """Return both bounds on a norm or ratio, in float32: None bounds nothing."""
    names = f"min_{name}", f"max_{name}"
    low = np.float32(0) if low is None else as_nonnegative(caller, names[0], low)
    high = np.float32(np.inf) if high is None else as_nonnegative(caller, names[1], high)
    check_order(caller, names[0], low, names[1], high)
    return {names[0]: low, names[1]: high}


def _power(caller: str, value):
    power = as_float32(caller, "trust_power", value)
    if isinstance(power, Tracer) or 0 < power < 1:
        return power
    problem = "cancels the learning rate: a schedule would do nothing" if power == 1 else "is outside (0, 1)"
    raise ValueError(
        f"{caller}: trust_power={value} {problem}. "
        "Use a number in (0, 1) such as 0.382, or None for LAMB's own ratio."
    )
