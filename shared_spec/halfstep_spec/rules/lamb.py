"""LAMB: Adam's step with a trust ratio for each leaf. Contract: L3, L4. Vectors: lamb."""

import dataclasses

import numpy as np

from halfstep_spec.rules.step import Links, Step
from halfstep_spec.rules.trust_ratio import ScaleByTrustRatio, scale_by_tempered_trust_ratio


@dataclasses.dataclass(frozen=True)
class Lamb(Step):
    """One step of LAMB on one leaf: Adam, decoupled decay, trust ratio, learning rate, weight storage.

    Attributes:
        max_norm: an upper bound on the norm of the weight.
        trust_power: makes it a step of `lamb16`.
        exact: norms follow N2.
    """

    max_norm: float = np.inf
    trust_power: float | None = None
    exact: bool = False

    def links(self, learning_rate) -> tuple[Links, Links]:
        """Return the links in front of Adam, and the links behind it."""
        before, (*decay, rate) = super().links(learning_rate)
        return before, (*decay, self._ratio(learning_rate), rate)

    def _ratio(self, learning_rate) -> ScaleByTrustRatio:
        if self.trust_power is None:
            return ScaleByTrustRatio(max_norm=self.max_norm, exact=self.exact)
        return scale_by_tempered_trust_ratio(learning_rate, self.trust_power, self.max_norm, self.exact)
