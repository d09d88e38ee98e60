"""The second moment alone. Contract: A16. Vectors: rms."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByRms(Rule):
    """Updates over the root of the average of their squares. Arguments as in `optax.scale_by_rms`."""

    decay: float = 0.9
    eps: float = 1e-8
    eps_in_sqrt: bool = True
    bias_correction: bool = False
    nu_dtype: str | Format = "float32"
    nu_rounding: str = "stochastic"
    seed: int = 0
    nu: Moment = moment("decay", signed=False)

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the reciprocal of the bias correction."""
        return {"r": 1 / bias_correction(self.decay, count) if self.bias_correction else np.float32(1)}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update, and round nu on the way; the formula is in the contract."""
        v = moments.nu.round(ema(moments.nu.value, g * g, n.decay)) * n.r
        return g / (np.sqrt(v + n.eps) if self.eps_in_sqrt else np.sqrt(v) + n.eps)
