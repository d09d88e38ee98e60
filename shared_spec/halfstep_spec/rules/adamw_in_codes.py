"""AdamW with weights in codes of 8 bits. Contract: A20, P8. Vectors: adamw_in_codes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import Moment, moment
from halfstep_spec.rules.adamw_fed_back import AHEAD, ReturningRule
from halfstep_spec.rules.step import Links, Step, StepState
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.state_dtypes import scaled

LARGEST = np.float32(2.0**20)
"""The bound of mu, below the end of integers under a fine scale (F14)."""


@dataclasses.dataclass(frozen=True)
class AdamWInCodes(ReturningRule):
    """The whole step of AdamW on weights in codes; the rounding error is added to the first moment.

    Attributes:
        peak_lr: the largest learning rate of the run, as far as it is known; 0 for that of this step.
        param_dtype: of the weights; arrays that are too small for it are float32.
    """

    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.0
    peak_lr: float = 0.0
    mu_dtype: str | Format = "float32"
    nu_dtype: str | Format = "float32"
    param_dtype: str | Format = scaled("int8", "row", scale="fine")  # noqa: RUF009
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    param_rounding: str = "stochastic"
    seed: int = 0
    mu: Moment = moment("b1", unit="nu")
    nu: Moment = moment("b2", signed=False)
    param: Moment = moment()

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the four numbers of a step."""
        one, lr = np.float32(1), np.float32(self.learning_rate)
        r1, r2 = (one / bias_correction(b, count) for b in (self.b1, self.b2))
        unbias = one / np.array([bias_correction(self.b1, count + 1 + k) for k in range(AHEAD)])
        decayed = lr * np.float32(self.weight_decay)
        back = self.back(self.b1, count, unbias, False)
        return {"r2": r2, "ahead": r1 * lr, "decayed": decayed, "back": back}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the update that leads to the stored weights; the formula is in the contract."""
        assert p is not None
        root = np.sqrt((moments.nu.round(ema(moments.nu.value, g * g, n.b2)) * n.r2) + n.eps_root) + n.eps
        v = ema(moments.mu.value, g, n.b1)
        down = ((v * n.ahead) / root) + (n.decayed * p)
        w = p - down
        q = moments.param.round(w)
        moments.mu.round(np.clip(v - (root * (n.back * (w - q))), -LARGEST, LARGEST))
        return np.where(q == w, -down, np.where(q == p, np.float32(-0.0), q - p))


@dataclasses.dataclass(frozen=True)
class InCodes(Step):
    """A step of that rule, which is all of it: decay and learning rate are the rule's."""

    def links(self, learning_rate) -> tuple[Links, Links]:
        """Return none."""
        return (), ()

    def init(self, p: np.ndarray) -> StepState:
        """Return the state of float32 weights: their codes are rounded to nearest."""
        state = super().init(p)
        fmt = self.rule.moments["param"].format(p.shape)
        moments = state.rule.moments | {"param": fmt.encode(p.view(np.float32), None)}
        return state._replace(rule=state.rule._replace(moments=moments))

    def step(self, p: np.ndarray, g: np.ndarray, state: StepState, leaf: str, learning_rate):
        """Return the new patterns of the weights and the new state."""
        rule: Any = self.rule
        rule = dataclasses.replace(rule, learning_rate=float(learning_rate), weight_decay=self.weight_decay)
        step = dataclasses.replace(self, rule=rule)
        return super(InCodes, step).step(p, g, state, leaf, learning_rate)
