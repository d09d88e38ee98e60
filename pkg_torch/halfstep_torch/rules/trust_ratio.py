"""LAMB's trust ratio: one factor per parameter, from the norms of weight and update. Contract: section L."""

import math
from collections.abc import Mapping
from typing import Any

import halfstep.rules.trust_ratio as shared
from halfstep.hyperparameters import check_order
from halfstep.rule import Rule, number
from halfstep_torch.link import Link, checked_rule
from halfstep_torch.rules.learning_rate import LEARNING_RATE


class ScaleByTrustRatio(shared.ScaleByTrustRatio, Link):
    """The rule of `scale_by_trust_ratio`, whose bounds a param group may change."""

    wide_weights = False  # norms are in float32, whatever the dtype

    def check(self, caller: str, h: Any) -> None:
        """Raise ValueError for a lower bound above its upper bound."""
        check_order(caller, "min_norm", h.min_norm, "max_norm", h.max_norm)
        check_order(caller, "min_ratio", h.min_ratio, "max_ratio", h.max_ratio)


class ScaleByTemperedTrustRatio(shared.ScaleByTemperedTrustRatio, Link):
    """The rule of `Lamb16`: LAMB's own ratio where `trust_power` is None.

    It reads the entry `lr`, which the link of the learning rate owns.
    """

    wide_weights = False  # norms are in float32, whatever the dtype
    trust_power: Any = number(None, check=shared.check_power, none=1.0)
    learning_rate: Any = LEARNING_RATE(default=None, owned=False)

    def numbers(self, h: Any, t: int, op: Any) -> Mapping[str, Any]:
        """Return coefficient and bounds of the ratio."""
        tempered = super().numbers(h, t, op)
        untempered = {"trust_coefficient": 1.0, "max_ratio": math.inf}
        return {**tempered, **untempered} if h.trust_power == 1 else tempered


def scale_by_trust_ratio(
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
    *,
    max_norm: float | None = None,
    min_ratio: float | None = None,
    max_ratio: float | None = None,
    exact: bool = False,
) -> Rule:
    """Scale each parameter's update by the ratio of its weight's norm to its own.

    With |p| and |u| the norms of a parameter's weight and update, both at least `min_norm`, and |p| at most
    `max_norm`:

        ratio = (trust_coefficient |p|) / (|u| + eps), but 1 where |p| or |u| is 0
        u <- clamp(ratio, min_ratio, max_ratio) u

    In float32, whatever the dtypes. The norms neither underflow nor overflow while the norm itself is a
    float32 number; they are sums, rounded in torch's own order. Each operation after them is rounded once. A
    step keeps the update of one parameter (or of many short ones) in float32 until its norm is known. Of
    sharded parameters it keeps all updates of this process. Norms of shards are brought together by one
    collective for all parameters, two with `exact`.

    Group entries: all arguments but `eps`. A group with `min_ratio=1, max_ratio=1` skips the ratio, as is
    common for biases.

    Args:
        min_norm: a lower bound on both norms.
        trust_coefficient: a factor of the ratio.
        eps: added to the norm of the update.
        max_norm: an upper bound on the norm of the weight. With `min_norm`, LAMB's phi(z) = min(max(z,
            gamma_l), gamma_u); some published code has 10.
        min_ratio: a lower bound on the ratio, its 1 for zero norms included.
        max_ratio: an upper bound, likewise.
        exact: add integers, so that both norms have the same bits in any order, and in JAX, as in
            `clip_by_global_norm`. It takes some five times the time of a norm on a CPU.

    Raises:
        TypeError: for what is not a number.
        ValueError: if one is negative, or a lower bound above its upper bound.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> tx = hs.chain(hs.scale_by_trust_ratio(), hs.scale_by_learning_rate(0.5))
        >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = hs.Optimizer([p], tx)
        >>> p.grad = torch.tensor([0.0, 0.5])
        >>> optimizer.step()
        >>> p.tolist()
        [3.0, 1.5]

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, arXiv:1904.00962, algorithm 2; arguments as in Optax (contract L2).
    """
    return checked_rule(ScaleByTrustRatio(**locals()))
