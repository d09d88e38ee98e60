"""Whole steps: the order in which the links of `adam` and `adamw` stand.

Contract: section A. Vectors: adam.
"""

import dataclasses

import numpy as np

from halfstep_spec.adam import AdamState, ScaleByAdam
from halfstep_spec.learning_rate import scale_by_learning_rate
from halfstep_spec.params import apply_updates, param_words, round_stochastically
from halfstep_spec.rounding import decode
from halfstep_spec.weight_decay import add_decayed_weights


@dataclasses.dataclass(frozen=True)
class AdamStep:
    """One optimizer step on one leaf: moments, decay, learning rate, landing.

    Attributes:
        adam: the update rule.
        weight_decay: 0 leaves the decay link out.
        decay: "decoupled" (AdamW: after `scale_by_adam`) or "l2" (before it, into the moments).
        param_dtype: of the weights.
        param_storage: "stochastic" or "nearest".
    """

    adam: ScaleByAdam
    weight_decay: float = 0.0
    decay: str = "decoupled"
    param_dtype: str = "bfloat16"
    param_storage: str = "stochastic"

    def step(self, p: np.ndarray, g: np.ndarray, state: AdamState, leaf: str, learning_rate):
        """Return the new patterns of the weights and the new state.

        Args:
            p: patterns of `param_dtype`.
            g: float32 values of the gradient.
            state: of this leaf.
            leaf: its name.
            learning_rate: of this step.
        """
        p32 = decode(p, self.param_dtype)
        if self.weight_decay and self.decay == "l2":
            g = add_decayed_weights(g, p32, self.weight_decay)
        u, state = self.adam.update(g, state, leaf)
        if self.weight_decay and self.decay == "decoupled":
            u = add_decayed_weights(u, p32, self.weight_decay)
        u = scale_by_learning_rate(u, learning_rate)
        if self.param_storage == "stochastic":
            words = param_words(self.adam.seed, state.count, leaf, p.shape)
            u = round_stochastically(p, u, self.param_dtype, words)
        return apply_updates(p, u, self.param_dtype), state
