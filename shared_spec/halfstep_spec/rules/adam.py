"""The Adam update rule. Contract: A5, A12. Vectors: adam, no_contraction, fourth_roots."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.fourth_root_codes import FLOOR


@dataclasses.dataclass(frozen=True)
class ScaleByAdam(Rule):
    """Rescale updates by Adam. Arguments as in `optax.scale_by_adam`, plus dtypes, roundings and seed.

    Attributes:
        mu_rounding: "nearest", "stochastic", "feedback" or "auto"; so `nu_rounding`, but for "feedback".
        bias_correction: False: r1 = r2 = r1' = 1.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    mu_dtype: str | Format = "float32"
    nu_dtype: str | Format = "float32"
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    nesterov: bool = False
    seed: int = 0
    bias_correction: bool = True
    mu: Moment = moment("b1", unit="nu", linear=True)
    nu: Moment = moment("b2", signed=False)

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return r1, r2 and r1', the reciprocals of the bias corrections, and the numbers of A12."""
        one = np.float32(1)
        r1 = r2 = r1_next = one
        if self.bias_correction:
            r1 = one / bias_correction(self.b1, count)
            r2 = one / bias_correction(self.b2, count)
            r1_next = one / bias_correction(self.b1, count + 1)
        o2, eps = one - np.float32(self.b2), np.float32(self.eps)
        smallest = np.maximum(eps * eps + np.float32(self.eps_root), FLOOR)
        return {
            "r1": r1,
            "r2": r2,
            "r1_next": r1_next,
            "rest": o2,
            "floor": o2 * smallest + FLOOR * np.float32(2.0**-16),
            "unbias": (one if self.nesterov else r1) / np.sqrt(r2),
        }

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update.

        With t = count + 1, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

            m <- round((b1 m) + ((1 - b1) g))
            v <- round((b2 v) + ((1 - b2) (g g)))
            u = (m r1) / (sqrt((v r2) + eps_root) + eps)

        Rounds m and v to their formats, once each; u reads the stored values, or the
        result of `_fed_back`. With `nesterov`, (m r1) becomes (b1 (m r1')) + ((1 - b1) (g r1)); r1' is r1 at
        t + 1.
        Where nu is kept as its fourth root: `_by_inverse_root`.
        """
        mu, nu = moments.mu, moments.nu
        if nu.has_inverse_root:
            return self._by_inverse_root(g, n, mu, nu)
        v = nu.round(ema(nu.value, g * g, n.b2))
        m = mu.round(ema(mu.value, g, n.b1))
        m_hat = ema(m * n.r1_next, g * n.r1, n.b1) if self.nesterov else m * n.r1
        return m_hat / (np.sqrt(v * n.r2 + n.eps_root) + n.eps)

    def _by_inverse_root(self, g: np.ndarray, n: Any, mu: Any, nu: Any) -> np.ndarray:
        """Return the update of moments before they are stored (contract A12).

            v = (b2 nu) + (((1 - b2) (g g)) + floor)
            m = (b1 mu) + ((1 - b1) g)
            u = (m s) unbias,   s about 1/sqrt(v), unbias = r1 / sqrt(r2)

        floor is (1 - b2) (eps^2 + eps_root), or that of the smallest number of the format if this is more,
        and a little: so v is never below that number.
        """
        v = (n.b2 * nu.value) + ((n.rest * (g * g)) + n.floor)
        s = nu.inverse_root(v)
        m = ema(mu.value, g, n.b1)
        mu.round(m)
        ahead = ema(m * n.r1_next, g * n.r1, n.b1) if self.nesterov else m
        return (ahead * s) * n.unbias
