"""A whole step of any update rule: the order of the links, and how the weight is stored.

Contract: A6, section P. Vectors: adam, weights, lion, trace.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from halfstep_spec.numbers.random_words import Role, random_words
from halfstep_spec.rule import Rule, RuleState
from halfstep_spec.rules.learning_rate import ScaleByLearningRate
from halfstep_spec.rules.weight_decay import AddDecayedWeights
from halfstep_spec.weights.weight_rule import WeightRule, apply_updates
from halfstep_spec.weights.weight_storage import param_storage

Links = tuple[Rule, ...]


class StepState(NamedTuple):
    """State of one leaf between steps.

    Attributes:
        rule: of the update rule.
        extra: the array beside the weight: its compensation, low bits or master copy; None without one.
    """

    rule: RuleState
    extra: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step on one leaf: update rule, decay, learning rate, weight storage.

    Attributes:
        rule: the update rule.
        weight_decay: 0 leaves the decay link out.
        decay: "decoupled" (after the update rule), "l2" (before it, into the moments), or "cautious" (after
            it, where it does not pull against the step).
        param_dtype: of the weights.
        param_storage: the name of one of `PARAM_STORAGES`.
    """

    rule: Rule
    weight_decay: float = 0.0
    decay: str = "decoupled"
    param_dtype: str = "bfloat16"
    param_storage: str = "stochastic"

    @property
    def storage(self) -> WeightRule:
        """How the weight is stored."""
        return param_storage(self.param_storage, self.param_dtype)

    def links(self, learning_rate) -> tuple[Links, Links]:
        """Return the links in front of the update rule, and the links behind it."""
        link = AddDecayedWeights(self.weight_decay, cautious=self.decay == "cautious")
        decay = (link,) if self.weight_decay else ()
        before, after = {"l2": (decay, ()), "decoupled": ((), decay), "cautious": ((), decay)}[self.decay]
        return before, (*after, ScaleByLearningRate(learning_rate))

    def init(self, p: np.ndarray) -> StepState:
        """Return the state of a leaf with weights of the patterns `p`."""
        return StepState(self.rule.init(p.shape), self.storage.init(p))

    def float32_params(self, p: np.ndarray, state: StepState) -> np.ndarray:
        """Return the weights as precisely as they are known."""
        return self.storage.join(p, state.extra)

    def step(self, p: np.ndarray, g: np.ndarray, state: StepState, leaf: str, learning_rate):
        """Return the new patterns of the weights and the new state.

        Args:
            p: patterns of `param_dtype`.
            g: float32 values of the gradient.
            state: of this leaf.
            leaf: its name.
            learning_rate: of this step.
        """
        p32 = self.storage.seen(p, state.extra)
        before, after = self.links(learning_rate)
        u = _through(before, g, p32)
        u, rule = self.rule.step(u, state.rule, leaf, p32)
        u = _through(after, u, p32)
        words = random_words(self.rule.seed, rule.count, leaf, Role.PARAM, p.shape)
        u, extra = self.storage.emit(p, u, state.extra, words)
        return apply_updates(p, u, self.param_dtype), StepState(rule, extra)


def _through(links: Links, u: np.ndarray, p32: np.ndarray) -> np.ndarray:
    """Return an update after links without a state."""
    for link in links:
        u, _ = link.step(u, link.init(u.shape), "", p32)
    return u
