"""The Lion update rule. Contract: A9. Vectors: lion."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import ema
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByLion(Rule):
    """The sign of an average of the gradients. Arguments as in `optax.scale_by_lion`, plus rounding and seed.

    Attributes:
        mu_rounding: "nearest", "stochastic" or "auto", by b2.
    """

    b1: float = 0.9
    b2: float = 0.99
    mu_dtype: str | Format = "float32"
    mu_rounding: str = "auto"
    seed: int = 0
    mu: Moment = moment("b2")

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update; m is the stored value of the step before.

            u = sign((b1 m) + ((1 - b1) g))
            m <- round((b2 m) + ((1 - b2) g))

        Rounds m to its format, once. The sign of zero, of either sign, is +0, that of NaN is NaN.
        """
        mu = moments.mu
        u = _sign(ema(mu.value, g, n.b1))
        mu.round(ema(mu.value, g, n.b2))
        return u


def _sign(x: np.ndarray) -> np.ndarray:
    """Return 1, -1, +0 for zero of either sign, and NaN for NaN."""
    u = (x > 0).astype(np.float32) - (x < 0).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), u)
