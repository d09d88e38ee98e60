"""The learning rate. Contract: D2. Vectors: adam, no_contraction."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.rule import Rule


@dataclasses.dataclass(frozen=True)
class ScaleByLearningRate(Rule):
    """Multiply updates by the learning rate.

    Attributes:
        learning_rate: a schedule has been read already, at the count before its increment.
        flip_sign: True to descend.
    """

    learning_rate: float
    flip_sign: bool = True

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return (-learning_rate) g, or learning_rate g without `flip_sign`; rounded once."""
        return (-n.learning_rate if self.flip_sign else n.learning_rate) * g
