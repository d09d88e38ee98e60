"""The trust ratios of LAMB and LAMB16 (contract L2, L4)."""

import math
from dataclasses import KW_ONLY

from halfstep.hyperparameters import Scalar, check_bound
from halfstep.numbers import Number, Numbers
from halfstep.op import Op
from halfstep.rule import Rule, number

TEMPERED_COEFFICIENT = 1e-3
TEMPERED_MAX_RATIO = 2.0


def without_feedback(rounding: str) -> str:
    """Return the rounding for mu in front of a trust ratio: "stochastic" for "feedback" (contract F19).

    Feedback makes updates longer, with 4 bits by two fifths, and the ratio divides by their norm.
    """
    return "stochastic" if rounding == "feedback" else rounding


class TrustRatio(Rule):
    """Base class of both ratios. n has `trust_coefficient`, `eps` and the bounds. `exact` adds integers."""

    scope = "parameter"
    needs = "norms"
    reads_params = "the link compares the norms of params and updates"
    exact = False

    def update(self, g, p, n, m, op):
        """Return the update times the ratio of the norms."""
        p_norm, (u_norm, scale) = op.norm(p, self.exact), op.norm_in_range(g, self.exact)
        return op.scaled(g, self.ratio(p_norm, u_norm, scale, n, op), scale)

    def ratio(self, p_norm: Number, u_norm: Number, scale: Number, n: Numbers, op: Op) -> Number:
        """Return the ratio from both norms. The update was multiplied by `scale`, which is 1 or 2^-64."""
        up = 1.0 / scale
        p_norm = op.clamp(p_norm, n.min_norm, n.max_norm)
        u_norm = op.maximum(u_norm, scale * n.min_norm)
        quotient = (n.trust_coefficient * p_norm) / (u_norm + scale * n.eps)
        ratio = self.tempered(quotient, up, n, op)
        # If a norm is 0, the quotient would freeze the leaf forever.
        ratio = op.where((p_norm == 0) | (u_norm == 0), up, ratio)
        return op.clamp(ratio, up * n.min_ratio, up * n.max_ratio)

    def tempered(self, quotient: Number, up: Number, n: Numbers, op: Op) -> Number:
        """Return the quotient unchanged."""
        return quotient


class ScaleByTrustRatio(TrustRatio):
    """Scale the update of each weight by the ratio of the weight's norm to the update's norm.

    With |p| and |u| the norms of weight and update, both at least `min_norm`, and |p| at most `max_norm`:

        ratio = (trust_coefficient |p|) / (|u| + eps), but 1 if |p| or |u| is 0
        u <- clamp(ratio, min_ratio, max_ratio) u

    All operations are in float32, whatever the dtypes. A norm neither underflows nor overflows as long as its
    own value is a float32 number. (Optax's norms are in the weights' dtype, and underflow to 0 if the
    elements are 1e-20.) Sums are rounded in the framework's own order, and each operation after them once.

    In JAX the link needs `params`. Under `optax.masked` the updates of other leaves are not changed.

    In torch, entries of param groups are all arguments except `eps` and `exact`. A group with
    `min_ratio=1, max_ratio=1` skips the ratio, as is common for biases. Kernels compute an update twice, for
    its norm and for the weights, with `exact` three times, and do not store it. Plain steps keep one update
    (or several short updates) in float32 until its norm is known. If parameters are sharded, they keep all
    updates on this process. One collective for all parameters adds the norms of shards, with `exact` two.

    Args:
        min_norm: a lower bound on both norms.
        trust_coefficient: a factor in the ratio.
        eps: number added to the norm of the update.
        max_norm: an upper bound on the norm of the weight. With `min_norm` it gives LAMB's phi(z) =
            min(max(z, gamma_l), gamma_u). Some published code uses 10.
        min_ratio: a lower bound on the ratio, also if the ratio is 1 because a norm is 0.
        max_ratio: an upper bound on the ratio, likewise.
        exact: whether to add integers, so that both norms have the same bits in any order, on any mesh and in
            either framework, as in `clip_by_global_norm`. On a CPU a norm takes some 20 times as long in JAX,
            5 times in torch.
        axis_names: only in JAX. Inside `jax.shard_map`, the mesh axes over which arrays are sharded, or () if
            every device has whole arrays. Outside it they have no effect, because under `jax.jit` a sharded
            array is a whole array.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a number is negative, or a lower bound is above its upper bound. In JAX without
            `params`, and inside `jax.shard_map` without `axis_names`.

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, optax
        >>> tx = optax.chain(halfstep_jax.scale_by_trust_ratio(), halfstep_jax.scale_by_learning_rate(0.5))
        >>> tx = hs.chain(hs.scale_by_trust_ratio(), hs.scale_by_learning_rate(0.5))

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, arXiv:1904.00962, algorithm 2. Arguments as in `optax.scale_by_trust_ratio` (contract L2).
    """

    ordered = (("min_norm", "max_norm"), ("min_ratio", "max_ratio"))

    min_norm: Scalar = number(0.0, check=check_bound, none=0.0)
    trust_coefficient: Scalar = number(1.0)
    eps: Scalar = number(0.0, torch=None)  # the entry `eps` is another rule's
    _: KW_ONLY
    max_norm: Scalar = number(None, check=check_bound, none=math.inf)
    min_ratio: Scalar = number(None, check=check_bound, none=0.0)
    max_ratio: Scalar = number(None, check=check_bound, none=math.inf)
    exact: bool = False


def check_power(caller: str, name: str, value: Scalar, number: float) -> None:
    """Raise an error for a power outside (0, 1)."""
    if 0 < number < 1:
        return
    problem = "cancels the learning rate: a schedule would do nothing" if number == 1 else "is outside (0, 1)"
    raise ValueError(
        f"{caller}: {name}={value} {problem}. "
        "Use a number in (0, 1) such as 0.382, or None for LAMB's own ratio."
    )


class ScaleByTemperedTrustRatio(TrustRatio):
    """Scale updates by a power of the trust ratio, relative to the learning rate, as LAMB16 does.

        ratio = clamp((((1e-3 / learning_rate) |p|) / |u|)^trust_power, 0, 2), but 1 if |p| or |u| is 0

    In float32, each operation rounded once, and the power to within units in the last place.
    `learning_rate` is the next link's learning rate, and `trust_power` a number in (0, 1).

    Source: the ratio in LAMB16's published code, with norms instead of its own measure (contract L4).
    """

    name = "lamb16"

    trust_power: Scalar = number(check=check_power)
    learning_rate: Scalar = number(schedule=True, torch="lr", owned=False)
    max_norm: Scalar = number(None, check=check_bound, none=math.inf)
    exact: bool = False

    def numbers(self, h, t, op):
        """Return the coefficient 1e-3 / learning_rate, and the bounds."""
        lower = dict.fromkeys(("min_norm", "eps", "min_ratio"), 0.0)
        coefficient = TEMPERED_COEFFICIENT / h.learning_rate
        return lower | {"trust_coefficient": coefficient, "max_ratio": TEMPERED_MAX_RATIO}

    def tempered(self, quotient: Number, up: Number, n: Numbers, op: Op) -> Number:
        """Return (quotient / up)^trust_power up, from factors that are float32 numbers."""
        return op.power(quotient, n.trust_power) * (up / op.power(up, n.trust_power))
