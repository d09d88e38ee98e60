"""Weight decay. Contract: D1. Vectors: adam, no_contraction."""

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
    """

    weight_decay: float = 0.0
    absolute: bool = False

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return g + (weight_decay p), or with `absolute` g - (weight_decay p): two roundings."""
        assert p is not None
        return g + (-n.weight_decay if self.absolute else n.weight_decay) * p
