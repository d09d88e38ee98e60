"""The Muon update rule. Contract: A13, A14. Vectors: muon."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.newton_schulz import newton_schulz, shape_scale
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByMuon(Rule):
    """Momentum, and the factor of its matrix, times a number of its shape; on arrays of two axes.

    Attributes:
        beta: rate of the average.
        nesterov: one step ahead of the average.
        bias_correction: in Optax's form, where both terms are corrected, at counts that differ by one.
        output_axis: 1 for inputs by outputs, 0 for outputs by inputs.
        scale: "original", "consistent_rms" or None.
        given: the factor is the input itself, so that a case tests a step with a given factor, to the bit.
    """

    scope = "parameter"

    beta: float = 0.95
    mu_dtype: str | Format = "float32"
    mu_rounding: str = "nearest"
    nesterov: bool = True
    bias_correction: bool = False
    output_axis: int = 1
    scale: str | None = "original"
    given: bool = False
    seed: int = 0
    mu: Moment = moment("beta", amplified=True)

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the reciprocals of the bias corrections at this step and the next."""
        rates = {"r1": count, "r1_next": count + 1}
        return {name: 1 / bias_correction(self.beta, t) for name, t in rates.items()}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return s o, where o is the factor of the result of `momentum`."""
        h = self.momentum(g, n, moments.mu)
        inputs, outputs = g.shape[1 - self.output_axis], g.shape[self.output_axis]
        factor = h if self.given else newton_schulz(h, [1 - self.output_axis], [self.output_axis])
        return factor * shape_scale(self.scale, inputs, outputs)

    def momentum(self, g: np.ndarray, n: Any, mu: Any) -> np.ndarray:
        """Round the average, and return it; with `nesterov`, (beta m) + ((1 - beta) g) of the stored m."""
        m = mu.round(ema(mu.value, g, n.beta))
        if not self.nesterov:
            return m * n.r1 if self.bias_correction else m
        return ema(m * n.r1_next, g * n.r1, n.beta) if self.bias_correction else ema(m, g, n.beta)
