"""SGD with rounding errors of weights in the momentum. Contract: A23. Vectors: sgd_fed_back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.rule import Moment, moment
from halfstep_spec.rules.adamw_fed_back import AHEAD, FedBack, FedBackRule
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class SGDFedBack(FedBackRule):
    """The whole step of SGD: it rounds weights, and adds the rounding error to the sum of gradients.

    Attributes:
        peak_lr: the largest learning rate of the run, as far as it is known; 0 for that of this step.
    """

    learning_rate: float = 1e-3
    decay: float = 0.9
    peak_lr: float = 0.0
    nesterov: bool = False
    accumulator_dtype: str | Format = "float32"
    rounding: str = "auto"
    seed: int = 0
    trace: Moment = moment("decay", dtype="accumulator_dtype", rounding="rounding")

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the factor of errors, if no gap bounds it."""
        return {"back": self.back(self.decay, count, np.ones(AHEAD, np.float32), self.nesterov)}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the update that leads to the rounded weights; the formula is in the contract."""
        assert p is not None
        t = g + (n.decay * moments.trace.value)
        down = n.learning_rate * (g + (n.decay * t) if self.nesterov else t)
        w = p - down
        q = moments.param.round(w)
        with np.errstate(over="ignore"):  # an infinite bound bounds nothing
            most = np.abs(t) * moments.param.bound(np.float32(2.0**127), 4)
        moments.trace.round(t - (np.minimum(n.back, most) * (w - q)))
        return self.emitted(p, down, w, q)


@dataclasses.dataclass(frozen=True)
class FedBackSGD(FedBack):
    """A step of that rule, behind L2 decay if there is any."""

    def at_rate(self, learning_rate: float) -> Any:
        """Return the rule at the learning rate of a step."""
        rule: Any = self.rule
        return dataclasses.replace(rule, learning_rate=learning_rate)
