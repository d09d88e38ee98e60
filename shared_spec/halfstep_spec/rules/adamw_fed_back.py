"""AdamW whose errors of rounding weights go into the first moment. Contract: A21. Vectors: adamw_fed_back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.random_words import Role, next_step, random_words
from halfstep_spec.rule import Moment, Rule, StepWeight, moment
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.storage.formats import Format
from halfstep_spec.weights.weight_rule import NearestWeights, apply_updates

_TINY = np.float32(2.0**-100)


@dataclasses.dataclass(frozen=True)
class FedBackRule(Rule):
    """A whole step: it rounds weights, and what this leaves out goes into the first moment (P9)."""

    def step(self, g, state, leaf, p=None, weight=None):
        """Do as `Rule.step`; without a `weight`, for float32 weights, which are not rounded."""
        if weight is None:
            weight = StepWeight(np.asarray(p, np.float32), "float32", None)
        return super().step(g, state, leaf, p, weight)

    @staticmethod
    def later(decay: Any, nesterov: bool) -> np.float32:
        """Return what the next steps take of an error that a moment of this decay rate has."""
        rate = np.float32(decay)
        return np.maximum(rate * rate if nesterov else rate, _TINY)

    @staticmethod
    def largest_rate(learning_rate: float, peak_lr: float) -> np.float32:
        """Return the learning rate, or an eighth of the largest of the run."""
        peak = np.float32(peak_lr) * np.float32(0.125)
        return np.maximum(np.maximum(np.float32(learning_rate), peak), _TINY)

    @staticmethod
    def emitted(p: np.ndarray, down: np.ndarray, w: np.ndarray, q: np.ndarray) -> np.ndarray:
        """Return the update that leads from p to q, which is w = p - down, rounded."""
        return np.where(q == w, -down, np.where(q == p, np.float32(-0.0), q - p))


@dataclasses.dataclass(frozen=True)
class AdamWFedBack(FedBackRule):
    """The whole step of AdamW: it rounds weights, and what this leaves out goes into the first moment.

    Attributes:
        peak_lr: the largest learning rate of the run, as far as it is known; 0 where it is not.
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
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    nesterov: bool = False
    seed: int = 0
    mu: Moment = moment("b1", unit="nu")
    nu: Moment = moment("b2", signed=False)

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the numbers of a step."""
        one, lr, b1 = np.float32(1), np.float32(self.learning_rate), np.float32(self.b1)
        r1, r1_next, r1_second = (one / bias_correction(self.b1, count + k) for k in range(3))
        ahead, then = (r1_next, r1_second) if self.nesterov else (r1, r1_next)
        c = ((one / ahead) + (one / then)) * np.float32(0.5)
        corrected = (np.sqrt(c) * np.float32(2)) + ((one + c) * np.float32(0.5))
        later = self.later(b1, self.nesterov)
        rate = self.largest_rate(self.learning_rate, self.peak_lr)
        return {
            "r2": one / bias_correction(self.b2, count),
            "ahead": ahead * lr,
            "now": r1 * lr,
            "decayed": lr * np.float32(self.weight_decay),
            "back": ((((one - b1) / later) * np.float32(1 / 3)) * (one / rate)) * corrected,
        }

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the update that leads to the rounded weights; the formula is in the contract."""
        assert p is not None
        root = np.sqrt((moments.nu.round(ema(moments.nu.value, g * g, n.b2)) * n.r2) + n.eps_root) + n.eps
        v = ema(moments.mu.value, g, n.b1)
        step = ema(v * n.ahead, g * n.now, n.b1) if self.nesterov else v * n.ahead
        down = (step / root) + (n.decayed * p)
        w = p - down
        q = moments.param.round(w)
        back = moments.param.bound(n.back, -1 if moments.mu.is_coarse else 4)
        moments.mu.round(v - (root * (back * (w - q))))
        return self.emitted(p, down, w, q)


@dataclasses.dataclass(frozen=True)
class FedBack(Step):
    """A step of that rule, which rounds the weights itself, behind L2 decay if there is any."""

    @property
    def storage(self) -> NearestWeights:
        """How the weights are stored that the rule has rounded."""
        return NearestWeights(self.param_dtype)

    def at_rate(self, learning_rate: float) -> Any:
        """Return the rule at the learning rate of a step."""
        rule: Any = self.rule
        decay = self.weight_decay if self.decay == "decoupled" else 0.0
        return dataclasses.replace(rule, learning_rate=learning_rate, weight_decay=decay)

    def step(self, p: np.ndarray, g: np.ndarray, state: StepState, leaf: str, learning_rate):
        """Return the new patterns of the weights and the new state."""
        rule = self.at_rate(float(learning_rate))
        p32 = self.storage.seen(p, None)
        for link in self.links(learning_rate)[0]:
            g, _ = link.step(g, link.init(g.shape), "", p32)
        words = random_words(rule.seed, next_step(state.rule.count), leaf, Role.PARAM, p.shape)
        u, kept = rule.step(g, state.rule, leaf, p32, StepWeight(p32, self.param_dtype, words))
        return apply_updates(p, u, self.param_dtype), StepState(kept, None)
