"""Whole steps of any update rule: the order in which the links stand, and how weights are stored.

Contract: section A. Vectors: adam, weights, lamb.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from halfstep_spec.numbers.rounding import decode
from halfstep_spec.rule import RuleState, UpdateRule
from halfstep_spec.rules.learning_rate import scale_by_learning_rate
from halfstep_spec.rules.trust_ratio import TrustRatio, tempered_trust_ratio
from halfstep_spec.rules.weight_decay import add_decayed_weights
from halfstep_spec.weights.params import (
    SplitWeight,
    apply_updates,
    compensate,
    landing,
    nearest_away,
    param_words,
    round_stochastically,
)

PARAM_STORAGES = ("stochastic", "nearest", "compensated", "split8", "split16", "master")


class StepState(NamedTuple):
    """State of one leaf between steps.

    Attributes:
        rule: of the update rule.
        extra: what is kept beside the weight: compensation, extra bits, master copy; None where nothing is.
    """

    rule: RuleState
    extra: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step on one leaf: update rule, decay, learning rate, landing.

    Attributes:
        rule: the update rule.
        weight_decay: 0 leaves the decay link out.
        decay: "decoupled" (after the update rule) or "l2" (before it, into the moments).
        param_dtype: of the weights.
        param_storage: one of `PARAM_STORAGES`.
        trust: LAMB's ratio, after the decay; None leaves the link out.
        trust_power: makes that the ratio of `lamb16`, of which `trust` has only the bound `max_norm`.
    """

    rule: UpdateRule
    weight_decay: float = 0.0
    decay: str = "decoupled"
    param_dtype: str = "bfloat16"
    param_storage: str = "stochastic"
    trust: TrustRatio | None = None
    trust_power: float | None = None

    def init(self, p: np.ndarray) -> StepState:
        """Return the state of a leaf whose weights have the patterns `p`."""
        extra = None
        if self.param_dtype != "float32":
            if self.param_storage == "compensated":
                extra = np.zeros(p.shape, np.uint16)
            elif self.param_storage == "master":
                extra = decode(p, self.param_dtype)
            elif self._split:
                extra = np.zeros(p.shape, np.uint8 if self._split.extra_bits == 8 else np.uint16)
        return StepState(self.rule.init(p.shape), extra)

    def float32_params(self, p: np.ndarray, state: StepState) -> np.ndarray:
        """Return the weights as precisely as they are known."""
        if state.extra is None:
            return decode(p, self.param_dtype)
        if self.param_storage == "compensated":
            return decode(p, self.param_dtype) + decode(state.extra, "bfloat16")
        if self.param_storage == "master":
            return state.extra
        assert self._split
        return self._split.join(p, state.extra)

    def step(self, p: np.ndarray, g: np.ndarray, state: StepState, leaf: str, learning_rate):
        """Return the new patterns of the weights and the new state.

        The links see the weights as precisely as they are known; under "compensated", whose link is the
        last, they see the model's.

        Args:
            p: patterns of `param_dtype`.
            g: float32 values of the gradient.
            state: of this leaf.
            leaf: its name.
            learning_rate: of this step.
        """
        known = state if self.param_storage != "compensated" else StepState(state.rule, None)
        p32 = self.float32_params(p, known)
        if self.weight_decay and self.decay == "l2":
            g = add_decayed_weights(g, p32, self.weight_decay)
        u, rule = self.rule.update(g, state.rule, leaf, p32)
        if self.weight_decay and self.decay == "decoupled":
            u = add_decayed_weights(u, p32, self.weight_decay)
        if self.trust:
            u = self._trust_at(learning_rate).scale(u, p32)
        u = scale_by_learning_rate(u, learning_rate)
        words = param_words(self.rule.seed, rule.count, leaf, p.shape)
        u, extra = self._store(p, p32, u, state.extra, words)
        return apply_updates(p, u, self.param_dtype), StepState(rule, extra)

    def _trust_at(self, learning_rate) -> TrustRatio:
        assert self.trust
        if self.trust_power is None:
            return self.trust
        return tempered_trust_ratio(learning_rate, self.trust_power, self.trust.max_norm)

    @property
    def _split(self) -> SplitWeight | None:
        bits = {"split8": 8, "split16": 16}.get(self.param_storage)
        return SplitWeight(self.param_dtype, bits) if bits and self.param_dtype != "float32" else None

    def _store(self, p, p32, u, extra, words):
        """Return the update that lands, and what is kept beside the weight."""
        if self.param_dtype == "float32" or self.param_storage == "nearest":
            return u, None
        if self.param_storage == "stochastic":
            return round_stochastically(p, u, self.param_dtype, words), None
        if self.param_storage == "compensated":
            return compensate(p, u, self.param_dtype, extra)
        if self._split:
            shown, extra = self._split.split(p32 + u, words)
        else:
            extra = p32 + u
            shown = nearest_away(extra, self.param_dtype)
        old, new = decode(p, self.param_dtype), decode(shown, self.param_dtype)
        return landing(old, new), extra
