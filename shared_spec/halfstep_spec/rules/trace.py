"""Momentum, as an update rule. Contract: A10. Vectors: trace."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class Trace(Rule):
    """A decaying sum of the gradients. Arguments as in `optax.trace`, plus rounding and seed.

    Attributes:
        rounding: "nearest", "stochastic", "feedback" or "auto", by `decay`.
    """

    decay: float = 0.9
    nesterov: bool = False
    accumulator_dtype: str | Format = "float32"
    rounding: str = "auto"
    seed: int = 0
    trace: Moment = moment("decay", dtype="accumulator_dtype", rounding="rounding", linear=True)

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update.

            t <- round(g + (decay t))
            u = t, as it was stored; with `nesterov` g + (decay t)

        Rounds t to its format, once.
        """
        t = moments.trace.round(g + n.decay * moments.trace.value)
        return g + n.decay * t if self.nesterov else t
