"""Schedule-free averaging behind any update. Contract: A17. Vectors: schedule_free."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByScheduleFree(Rule):
    """Steps of weights that lead their own average; kept is that lead.

    Attributes:
        b1: how much of the average is in the weights.
        warmup_steps: over which updates rise to their length; 0 is none.
    """

    b1: float = 0.9
    warmup_steps: float = 0.0
    lead_dtype: str | Format = "float32"
    lead_rounding: str = "stochastic"
    seed: int = 0
    lead: Moment = moment()

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the three numbers of a step: of an update, of the lead that is kept, and of its pull."""
        one, two, six = np.float32(1), np.float32(2), np.float32(6)
        t, b1, steps = np.float32(count), np.float32(self.b1), max(np.float32(self.warmup_steps), one)
        k = min(t, steps)
        c = one / ((t - k) + ((k + one) * (two * k + one)) / (six * k))
        return {"ahead": (one - b1) * (k / steps), "keep": one - c, "pull": (b1 / (one - b1)) * c}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update, and round the lead on the way; the formula is in the contract."""
        d = n.ahead * g
        led = moments.lead.value + d
        moments.lead.round(n.keep * led)
        return d + (n.pull * led)
