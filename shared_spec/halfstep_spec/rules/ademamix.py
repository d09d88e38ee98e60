"""The AdEMAMix update rule. Contract: A15. Vectors: ademamix."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByAdemamix(Rule):
    """Adam with a second, slower average, which is not corrected. Rates and alpha are the paper's."""

    b1: float = 0.9
    b2: float = 0.999
    b3: float = 0.9999
    alpha: float = 5.0
    eps: float = 1e-8
    eps_root: float = 0.0
    mu_dtype: str | Format = "float32"
    slow_dtype: str | Format = "float32"
    nu_dtype: str | Format = "float32"
    mu_rounding: str = "nearest"
    slow_rounding: str = "stochastic"
    nu_rounding: str = "stochastic"
    seed: int = 0
    mu: Moment = moment("b1")
    slow: Moment = moment("b3")
    nu: Moment = moment("b2", signed=False)

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the reciprocals of two bias corrections."""
        return {"r1": 1 / bias_correction(self.b1, count), "r2": 1 / bias_correction(self.b2, count)}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update, and round three averages on the way; the formula is in the contract."""
        v = moments.nu.round(ema(moments.nu.value, g * g, n.b2))
        fast = moments.mu.round(ema(moments.mu.value, g, n.b1))
        slow = moments.slow.round(ema(moments.slow.value, g, n.b3))
        return ((fast * n.r1) + (n.alpha * slow)) / (np.sqrt((v * n.r2) + n.eps_root) + n.eps)
