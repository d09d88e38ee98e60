"""LAMB's trust ratio: one factor for each leaf. Contract: section L. Vectors: lamb."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.numbers.global_norm import global_norm, norm_in_range
from halfstep_spec.rule import Rule

TEMPERED_COEFFICIENT, TEMPERED_MAX_RATIO = np.float32(1e-3), 2.0
_ONE = np.float32(1)


@dataclasses.dataclass(frozen=True)
class ScaleByTrustRatio(Rule):
    """Scale an update by the ratio of its weight's norm to its own. Arguments as in Optax, and `power`.

    Attributes:
        min_norm: a lower bound on both norms.
        trust_coefficient: a factor of the ratio.
        eps: added to the norm of the update.
        max_norm: an upper bound on the norm of the weight.
        min_ratio: a lower bound on the ratio.
        max_ratio: an upper bound.
        power: to which the quotient is raised, before it is bounded; None: as it is.
        exact: norms of one array follow N2.
    """

    scope = "parameter"

    min_norm: float = 0.0
    trust_coefficient: float = 1.0
    eps: float = 0.0
    max_norm: float = np.inf
    min_ratio: float = 0.0
    max_ratio: float = np.inf
    power: float | None = None
    exact: bool = False

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return ratio g, rounded once."""
        assert p is not None
        p_norm = global_norm([p], exact=self.exact)
        u_norm, scale = norm_in_range(g, exact=self.exact)
        return self.ratio(p_norm, u_norm, scale) * (scale * g)

    def ratio(self, p_norm, u_norm, scale=_ONE) -> np.ndarray:
        """Return the float32 ratio of norms that are given (contract L2).

        (trust_coefficient |p|) / (|u| + eps) to the power, 1 where a norm is 0, within its bounds.

        Args:
            p_norm: of the weights, float32.
            u_norm: of the updates, float32.
            scale: by which the updates were multiplied before: `norm_in_range` says why.
        """
        n = self.numbers(1)
        p_norm = np.minimum(np.maximum(p_norm, n.min_norm), n.max_norm)
        u_norm = np.maximum(u_norm, scale * n.min_norm)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = (n.trust_coefficient * p_norm) / (u_norm + scale * n.eps)
            up = _ONE / scale
            low, high = up * n.min_ratio, up * n.max_ratio
        if self.power is not None:
            # In float64, and rounded once: the same bits on every machine. Backends are allowed ulps.
            power = np.float64(np.float32(self.power))
            powers = np.power(ratio.astype(np.float64), power) * np.power(np.float64(scale), power - 1)
            ratio = powers.astype(np.float32)
        ratio = np.where((p_norm == 0) | (u_norm == 0), up, ratio)
        return np.minimum(np.maximum(ratio, low), high)


def scale_by_tempered_trust_ratio(
    learning_rate, trust_power: float, max_norm: float = np.inf, exact: bool = False
) -> ScaleByTrustRatio:
    """Return the ratio of `lamb16`: ((1e-3 / learning_rate) |p| / |u|)^trust_power, at most 2."""
    with np.errstate(divide="ignore"):
        coefficient = float(TEMPERED_COEFFICIENT / np.float32(learning_rate))
    return ScaleByTrustRatio(
        trust_coefficient=coefficient,
        max_norm=max_norm,
        max_ratio=TEMPERED_MAX_RATIO,
        power=trust_power,
        exact=exact,
    )
