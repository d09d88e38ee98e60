"""The Adam update rule. Contract: A5. Vectors: adam, no_contraction."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByAdam(Rule):
    """Rescale updates by Adam. Arguments as in `optax.scale_by_adam`, plus dtypes, roundings and seed.

    Attributes:
        mu_rounding: "nearest", "stochastic", "paid" or "auto"; so `nu_rounding`, but for "paid".
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
        """Return r1, r2 and r1', the reciprocals of the bias corrections."""
        one = np.float32(1)
        if not self.bias_correction:
            return {"r1": one, "r2": one, "r1_next": one}
        return {
            "r1": one / bias_correction(self.b1, count),
            "r2": one / bias_correction(self.b2, count),
            "r1_next": one / bias_correction(self.b1, count + 1),
        }

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update.

        With t = count + 1, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

            m <- round((b1 m) + ((1 - b1) g))
            v <- round((b2 v) + ((1 - b2) (g g)))
            u = (m r1) / (sqrt((v r2) + eps_root) + eps)

        Rounds m and v to their formats, once each; u reads what was stored, or, of an m that is paid, what
        that leaves. With `nesterov`, (m r1) becomes (b1 (m r1')) + ((1 - b1) (g r1)), r1' being r1 at t + 1.
        """
        mu, nu = moments.mu, moments.nu
        v = nu.round(ema(nu.value, g * g, n.b2))
        m = mu.round(ema(mu.value, g, n.b1))
        m_hat = ema(m * n.r1_next, g * n.r1, n.b1) if self.nesterov else m * n.r1
        return m_hat / (np.sqrt(v * n.r2 + n.eps_root) + n.eps)
