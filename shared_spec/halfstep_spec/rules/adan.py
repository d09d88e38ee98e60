"""The Adan update rule. Contract: A11. Vectors: adan."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByAdan(Rule):
    """Adam with an average of the differences between gradients. Arguments as in `optax.scale_by_adan`."""

    b1: float = 0.98
    b2: float = 0.92
    b3: float = 0.99
    eps: float = 1e-8
    mu_dtype: str | Format = "float32"
    diff_dtype: str | Format = "float32"
    nu_dtype: str | Format = "float32"
    grad_dtype: str | Format = "float32"
    mu_rounding: str = "nearest"
    nu_rounding: str = "stochastic"
    seed: int = 0
    mu: Moment = moment("b1")
    diff: Moment = moment("b2", rounding="mu_rounding")
    nu: Moment = moment("b3", signed=False)
    grad: Moment = moment(rounding="mu_rounding")

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the reciprocals of the bias corrections, and whether there is a difference: 0 or 1."""
        rates = {"r1": self.b1, "r2": self.b2, "r3": self.b3}
        return {name: 1 / bias_correction(b, count) for name, b in rates.items()} | {"later": count > 1}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update, and round four arrays on the way; the formula is in the contract."""
        mu, diff, nu, grad = moments.mu, moments.diff, moments.nu, moments.grad
        d = n.later * (g - grad.value)
        grad.round(g)
        ahead = g + n.b2 * d
        v = nu.round(ema(nu.value, ahead * ahead, n.b3))
        m = mu.round(ema(mu.value, g, n.b1))
        e = diff.round(ema(diff.value, d, n.b2))
        return ((m * n.r1) + (n.b2 * (e * n.r2))) / (np.sqrt(v * n.r3) + n.eps)
