"""LAMB's trust ratio: one factor per parameter, from the norms of weight and update. Contract: section L."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.hyperparameters import as_float32, check_order, nonnegative
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.rules.learning_rate import rate_at, read_rate

TEMPERED_COEFFICIENT = np.float32(1e-3)
TEMPERED_MAX_RATIO = 2.0


@dataclasses.dataclass(frozen=True)
class TrustRatioRule:
    """A product with the ratio of two norms.

    Attributes:
        tempered: whether the ratio is raised to a power.
    """

    arrays: ClassVar[Mapping[str, StateArray]] = {}
    roles: ClassVar[tuple[Role, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = (
        *("coefficient", "min_norm", "max_norm", "eps"),
        *("min_ratio", "max_ratio", "power"),
    )
    tempered: bool = False

    def measure(self, p_norms: Tensor, u_norms: Tensor, numbers: Sequence[float]) -> Tensor:
        """Return the ratios (contract L2)."""
        coefficient, min_norm, max_norm, eps, min_ratio, max_ratio, power = numbers
        p_norms = p_norms.clamp(min_norm, max_norm)
        u_norms = u_norms.clamp(min_norm)
        ratios = (coefficient * p_norms) / (u_norms + eps)
        if self.tempered:
            ratios = torch.pow(ratios, power)
        # Where a norm is 0 the quotient would freeze the parameter for ever.
        ratios = torch.where((p_norms == 0) | (u_norms == 0), 1.0, ratios)
        return ratios.clamp(min_ratio, max_ratio)

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return ratio u, rounded once."""
        (ratio,) = numbers
        return ratio * u, {}


@dataclasses.dataclass(frozen=True)
class ScaleByTrustRatio(Link):
    """The transform that `scale_by_trust_ratio` returns; its arguments, unchecked."""

    function: ClassVar[str] = "scale_by_trust_ratio"
    min_norm: Any
    trust_coefficient: Any
    eps: Any
    max_norm: Any
    min_ratio: Any
    max_ratio: Any

    @property
    def entries(self) -> dict[str, Any]:
        """All arguments but `eps`, which is the name of another link's entry."""
        names = ("min_norm", "trust_coefficient", "max_norm", "min_ratio", "max_ratio")
        return {name: getattr(self, name) for name in names}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return the rule's numbers but the power."""
        return (
            nonnegative(function, "trust_coefficient", group["trust_coefficient"]),
            *_bounds(function, "norm", group["min_norm"], group["max_norm"]),
            nonnegative(function, "eps", self.eps),
            *_bounds(function, "ratio", group["min_ratio"], group["max_ratio"]),
        )

    def rule(self, function: str, values: tuple, weights: Weights) -> TrustRatioRule:
        """Return the product."""
        return TrustRatioRule()

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return `TrustRatioRule.number_names`."""
        return (*values, 1.0)


@dataclasses.dataclass(frozen=True)
class ScaleByTemperedTrustRatio(Link):
    """Scale by a power of the trust ratio, relative to the learning rate: for `Lamb16`.

    clamp((((1e-3 / lr) |p|) / |u|)^trust_power, 0, 2), but 1 where |p| or |u| is 0; rounded to float32 at
    each operation, the power to within units in the last place. LAMB's own ratio where `trust_power` is None.
    It reads the entry `lr`, which the link of the learning rate owns.

    Source: the ratio of LAMB16's published code, of norms in place of its own measure (contract L4).
    """

    function: ClassVar[str] = "scale_by_tempered_trust_ratio"
    trust_power: Any
    max_norm: Any

    @property
    def entries(self) -> dict[str, Any]:
        """`trust_power` and `max_norm`."""
        return {"trust_power": self.trust_power, "max_norm": self.max_norm}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return (trust_power or None, max_norm, lr)."""
        power = group["trust_power"]
        power = power if power is None else _power(function, power)
        _, max_norm = _bounds(function, "norm", 0.0, group["max_norm"])
        return power, max_norm, read_rate(function, group)

    def rule(self, function: str, values: tuple, weights: Weights) -> TrustRatioRule:
        """Return the product."""
        return TrustRatioRule(tempered=values[0] is not None)

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return `TrustRatioRule.number_names`."""
        power, max_norm, lr = values
        if power is None:
            return 1.0, 0.0, max_norm, 0.0, 0.0, math.inf, 1.0
        with np.errstate(divide="ignore"):  # at lr = 0 nothing moves, whatever the ratio
            coefficient = TEMPERED_COEFFICIENT / np.float32(rate_at(function, lr, step))
        return float(coefficient), 0.0, max_norm, 0.0, 0.0, TEMPERED_MAX_RATIO, power


def scale_by_trust_ratio(
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
    *,
    max_norm: float | None = None,
    min_ratio: float | None = None,
    max_ratio: float | None = None,
) -> Link:
    """Scale each parameter's update by the ratio of its weight's norm to its own.

    With |p| and |u| the norms of a parameter's weight and update, both at least `min_norm`, and |p| at most
    `max_norm`:

        ratio = (trust_coefficient |p|) / (|u| + eps), but 1 where |p| or |u| is 0
        u <- clamp(ratio, min_ratio, max_ratio) u

    In float32, whatever the dtypes. The norms neither underflow nor overflow while the norm itself is a
    float32 number; they are sums, rounded in torch's own order. Each operation after them is rounded once.
    A step keeps the update of one parameter (of many short ones) in float32 until its norm is known.

    Group entries: all arguments but `eps`. A group with `min_ratio=1, max_ratio=1` goes without the ratio, as
    biases often do.

    Args:
        min_norm: a lower bound on both norms.
        trust_coefficient: a factor of the ratio.
        eps: added to the norm of the update.
        max_norm: an upper bound on the norm of the weight. With `min_norm`, LAMB's phi(z) = min(max(z,
            gamma_l), gamma_u); some published code has 10.
        min_ratio: a lower bound on the ratio, its 1 for zero norms included.
        max_ratio: an upper bound, likewise.

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
    link = ScaleByTrustRatio(min_norm, trust_coefficient, eps, max_norm, min_ratio, max_ratio)
    link.read(link.function, link.entries)
    return link


def _bounds(function: str, name: str, low: Any, high: Any) -> tuple[float, float]:
    """Return both bounds on a norm or ratio: None bounds nothing."""
    names = f"min_{name}", f"max_{name}"
    lowest = 0.0 if low is None else nonnegative(function, names[0], low)
    highest = math.inf if high is None else nonnegative(function, names[1], high)
    check_order(function, names[0], lowest, names[1], highest)
    return lowest, highest


def _power(function: str, value: Any) -> float:
    power = as_float32(function, "trust_power", value)
    if 0 < power < 1:
        return power
    fault = "cancels the learning rate: a schedule would do nothing" if power == 1 else "is outside (0, 1)"
    raise ValueError(
        f"{function}: trust_power={value} {fault}. "
        "Use a number in (0, 1) such as 0.382, or None for LAMB's own ratio."
    )
