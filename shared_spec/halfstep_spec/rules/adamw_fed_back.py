"""AdamW with rounding errors of weights in the first moment. Contract: A21. Vectors: adamw_fed_back."""

import copy
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

AHEAD = 128
_TINY, _SMALLEST = np.float32(2.0**-100), np.float32(2.0**-20)


@dataclasses.dataclass(frozen=True)
class ReturningRule(Rule):
    """A whole step in which the rounding error of weights is added to the first moment.

    Attributes:
        coming: the rates of the `AHEAD` steps that follow; None where no schedule gives them.
    """

    coming: np.ndarray | None = dataclasses.field(default=None, init=False, compare=False)

    def back(self, decay: float, count: int, unbias: np.ndarray, nesterov: bool) -> np.float32:
        """Return the factor of an error, so that later steps with this decay rate take it back once.

        Args:
            decay: rate of the moment.
            count: 1 at the first step.
            unbias: inverse corrections of bias of the `AHEAD` steps that follow.
            nesterov: whether a step looks ahead, and takes a further factor of the rate.
        """
        rule: Any = self
        one, lr, peak = np.float32(1), np.float32(rule.learning_rate), np.float32(rule.peak_lr)
        rates, of_peak = self.coming, np.float32(1 / 32)
        if rates is None:
            rise = one + np.arange(1, AHEAD + 1, dtype=np.float32) / np.float32(count)
            rates, of_peak = np.minimum(lr * rise, np.maximum(peak, lr)), np.float32(1 / 4)
        b = np.maximum(np.float32(decay), _SMALLEST)
        later = b * b if nesterov else b
        x = rates * unbias
        last, power = x[-1], b
        while len(x) > 1:
            x = x[0::2] + power * x[1::2]
            power = np.maximum(power, _SMALLEST) * np.maximum(power, _SMALLEST)
        total = later * (x[0] + power * (last / (one - b)))
        least = (later / (one - b)) * (peak * of_peak)
        most = np.maximum(total, least)
        return np.float32(most > 0) / np.maximum(most, _TINY)

    def following(self, coming: np.ndarray | None) -> Any:
        """Return the rule with the rates of the steps that follow."""
        rule = copy.copy(self)
        object.__setattr__(rule, "coming", coming)
        return rule


@dataclasses.dataclass(frozen=True)
class FedBackRule(ReturningRule):
    """A whole step that rounds the weights of the model itself (P9)."""

    def step(self, g, state, leaf, p=None, weight=None):
        """Do as `Rule.step`; without a `weight`, for float32 weights, which are not rounded."""
        if weight is None:
            weight = StepWeight(np.asarray(p, np.float32), "float32", None)
        return super().step(g, state, leaf, p, weight)

    @staticmethod
    def emitted(p: np.ndarray, down: np.ndarray, w: np.ndarray, q: np.ndarray) -> np.ndarray:
        """Return the update that leads from p to q, which is w = p - down, rounded."""
        return np.where(q == w, -down, np.where(q == p, np.float32(-0.0), q - p))


@dataclasses.dataclass(frozen=True)
class AdamWFedBack(FedBackRule):
    """The whole step of AdamW: it rounds weights, and adds the rounding error to the first moment.

    Attributes:
        peak_lr: the largest learning rate of the run, as far as it is known; 0 for that of this step.
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
        one, lr = np.float32(1), np.float32(self.learning_rate)
        r1, r1_next = (one / bias_correction(self.b1, count + k) for k in range(2))
        then = count + 1 + self.nesterov
        unbias = one / np.array([bias_correction(self.b1, then + k) for k in range(AHEAD)])
        back, r2 = self.back(self.b1, count, unbias, self.nesterov), one / bias_correction(self.b2, count)
        return {
            "r2": r2,
            "ahead": (r1_next if self.nesterov else r1) * lr,
            "now": r1 * lr,
            "decayed": lr * np.float32(self.weight_decay),
            "back": back,
            "back_of_unit": back * np.sqrt(r2),
            "unit": one / np.sqrt(r2),
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
        ends = (room := moments.mu.room) < 4
        back = moments.param.bound(n.back_of_unit if ends else n.back, room) * (n.unit if ends else 1)
        moments.mu.round(v - (root * (back * (w - q))))
        return self.emitted(p, down, w, q)


@dataclasses.dataclass(frozen=True)
class FedBack(Step):
    """A step of that rule, which rounds the weights itself, behind L2 decay if there is any.

    Attributes:
        first: a count of steps.
        rates: of the steps after that count, where a schedule gives them; else empty.
    """

    first: int = 0
    rates: tuple[float, ...] = ()

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
        coming = None
        if self.rates:
            now = state.rule.count - self.first
            learning_rate, coming = self.rates[now], np.array(self.rates[now + 1 :][:AHEAD], np.float32)
        rule = self.at_rate(float(learning_rate)).following(coming)
        p32 = self.storage.seen(p, None)
        for link in self.links(learning_rate)[0]:
            g, _ = link.step(g, link.init(g.shape), "", p32)
        words = random_words(rule.seed, next_step(state.rule.count), leaf, Role.PARAM, p.shape)
        u, kept = rule.step(g, state.rule, leaf, p32, StepWeight(p32, self.param_dtype, words))
        return apply_updates(p, u, self.param_dtype), StepState(kept, None)
