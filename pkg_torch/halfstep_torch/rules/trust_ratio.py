"""LAMB's trust ratio: one factor per parameter, from the norms of weight and update. Contract: section L."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.declarations import number
from halfstep_torch.numbers.global_norm import global_norm
from halfstep_torch.numbers.hyperparameters import as_float32, bound, check_order
from halfstep_torch.numbers.norms import norm
from halfstep_torch.rule import Rule
from halfstep_torch.rules.learning_rate import read_rate

TEMPERED_COEFFICIENT = np.float32(1e-3)
TEMPERED_MAX_RATIO = 2.0


class RatioNumbers(NamedTuple):
    """What a trust ratio is computed with, besides the norms: float32 values."""

    trust_coefficient: float = 1.0
    min_norm: float = 0.0
    max_norm: float = math.inf
    eps: float = 0.0
    min_ratio: float = 0.0
    max_ratio: float = math.inf
    power: float = 1.0


def trust_ratio(p_norm: Tensor, u_norm: Tensor, n: RatioNumbers) -> Tensor:
    """Return the ratio of a weight's norm to that of its update, within its bounds (contract L2).

    Args:
        p_norm: of the weight, float32.
        u_norm: of the update, float32.
        n: coefficient and bounds; a power of 1 is none.
    """
    p_norm = p_norm.clamp(n.min_norm, n.max_norm)
    u_norm = u_norm.clamp(n.min_norm)
    ratio = (n.trust_coefficient * p_norm) / (u_norm + n.eps)
    if n.power != 1:
        ratio = torch.pow(ratio, n.power)
    # Where a norm is 0 the quotient would freeze the parameter for ever.
    ratio = torch.where((p_norm == 0) | (u_norm == 0), 1.0, ratio)
    return ratio.clamp(n.min_ratio, n.max_ratio)


def _norm(x: Tensor, exact: bool) -> Tensor:
    return global_norm([x], exact=True) if exact else norm(x)


def _bound(caller: str, name: str, value: Any, *, none: float) -> float:
    """Return a bound on a norm or ratio: None bounds nothing."""
    return none if value is None else bound(caller, name, value)


_lower = functools.partial(_bound, none=0.0)
_upper = functools.partial(_bound, none=math.inf)


@dataclasses.dataclass(frozen=True)
class ScaleByTrustRatio(Rule):
    """The transform that `scale_by_trust_ratio` returns; its arguments, unchecked."""

    scope: ClassVar[str] = "parameter"
    wide_weights: ClassVar[bool] = False  # norms are in float32, whatever the dtype
    min_norm: Any = number(0.0, check=_lower)
    trust_coefficient: Any = number(1.0)
    eps: Any = number(0.0, entry=None)  # the entry `eps` is another rule's
    max_norm: Any = number(None, check=_upper)
    min_ratio: Any = number(None, check=_lower)
    max_ratio: Any = number(None, check=_upper)
    exact: bool = False

    def check(self, caller: str, h: Any) -> None:
        """Raise ValueError for a lower bound above its upper bound."""
        check_order(caller, "min_norm", h.min_norm, "max_norm", h.max_norm)
        check_order(caller, "min_ratio", h.min_ratio, "max_ratio", h.max_ratio)

    def numbers(self, h: Any, step: int) -> Mapping[str, Any]:
        """Return the power: none."""
        return {"power": 1.0}

    def update(self, g: Tensor, p: Tensor, n: Any, moments: Any) -> Tensor:
        """Return ratio u, rounded once."""
        ratio = trust_ratio(_norm(p, self.exact), _norm(g, self.exact), n)
        return g.mul_(ratio)  # in place: no memory of the size of a parameter


@dataclasses.dataclass(frozen=True)
class ScaleByTemperedTrustRatio(Rule):
    """Scale by a power of the trust ratio, relative to the learning rate: for `Lamb16`.

    clamp((((1e-3 / lr) |p|) / |u|)^trust_power, 0, 2), but 1 where |p| or |u| is 0; rounded to float32 at
    each operation, the power to within units in the last place. LAMB's own ratio where `trust_power` is None.
    It reads the entry `lr`, which the link of the learning rate owns.

    Source: the ratio of LAMB16's published code, of norms in place of its own measure (contract L4).
    """

    scope: ClassVar[str] = "parameter"
    wide_weights: ClassVar[bool] = False  # norms are in float32, whatever the dtype
    trust_power: Any = number(None, check=lambda *value: _power(*value))
    max_norm: Any = number(None, check=_upper)
    lr: Any = number(None, check=read_rate, owned=False)
    exact: bool = False

    def numbers(self, h: Any, step: int) -> Mapping[str, Any]:
        """Return coefficient and bounds of the ratio."""
        if h.trust_power is None:
            return RatioNumbers(max_norm=h.max_norm)._asdict()
        with np.errstate(divide="ignore"):  # at lr = 0 nothing moves, whatever the ratio
            coefficient = TEMPERED_COEFFICIENT / np.float32(h.lr.at(step))
        tempered = RatioNumbers(coefficient, max_norm=h.max_norm, power=h.trust_power)
        return tempered._replace(max_ratio=TEMPERED_MAX_RATIO)._asdict()

    def update(self, g: Tensor, p: Tensor, n: Any, moments: Any) -> Tensor:
        """Return ratio u, rounded once."""
        ratio = trust_ratio(_norm(p, self.exact), _norm(g, self.exact), n)
        return g.mul_(ratio)  # in place: no memory of the size of a parameter


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
    float32 number; they are sums, rounded in torch's own order. Each operation after them is rounded once.
    A step keeps the update of one parameter (of many short ones) in float32 until its norm is known.

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

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: for what is not a number.
        ValueError: if one is negative, or a lower bound above its upper bound.

    Example:
        >>> import halfstep_torch as hs
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
    return ScaleByTrustRatio(
        min_norm=min_norm,
        trust_coefficient=trust_coefficient,
        eps=eps,
        max_norm=max_norm,
        min_ratio=min_ratio,
        max_ratio=max_ratio,
        exact=exact,
    ).checked()


def _power(caller: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    power = as_float32(caller, name, value)
    if 0 < power < 1:
        return power
    problem = "cancels the learning rate: a schedule would do nothing" if power == 1 else "is outside (0, 1)"
    raise ValueError(
        f"{caller}: {name}={value} {problem}. "
        "Use a number in (0, 1) such as 0.382, or None for LAMB's own ratio."
    )
