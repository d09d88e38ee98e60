"""Weight decay. Contract: D1, D3. Vectors: adam, lion, muon, no_contraction."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.rule import Rule


@dataclasses.dataclass(frozen=True)
class AddDecayedWeights(Rule):
    """Add a share of the weights to updates.

    Attributes:
        weight_decay: the share.
        absolute: for use after the learning rate, which then does not scale the decay.
        cautious: decay only where it does not pull against the step.
    """

    weight_decay: float = 0.0
    absolute: bool = False
    cautious: bool = False

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return g + (weight_decay p), or with `absolute` g - (weight_decay p): two roundings.

        With `cautious` g where a step along -g, or with `absolute` along g, leads away from 0 (contract D3).
        """
        assert p is not None
        decayed = g + (-n.weight_decay if self.absolute else n.weight_decay) * p
        if not self.cautious:
            return decayed
        away = np.sign(p) * (1 if self.absolute else -1)
        return np.where((g != 0) & (p != 0) & (np.sign(g) == away), g, decayed)
