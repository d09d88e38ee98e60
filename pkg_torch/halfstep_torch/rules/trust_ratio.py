"""LAMB's trust ratio: one factor per parameter, from the norms of weight and update. Contract: section L."""

import math

import halfstep.rules.trust_ratio as shared
from halfstep.hyperparameters import Scalar
from halfstep.rule import number
from halfstep_torch.links.link import Link, link_of
from halfstep_torch.rules.learning_rate import LEARNING_RATE


class ScaleByTemperedTrustRatio(shared.ScaleByTemperedTrustRatio, Link):
    """The rule of `Lamb16`, which is LAMB's own ratio if `trust_power` is None.

    It reads the entry `lr`, which the link of the learning rate owns.
    """

    trust_power: Scalar = number(None, check=shared.check_power, none=1.0)
    learning_rate: Scalar = LEARNING_RATE(default=None, owned=False)

    def numbers(self, h, t, op):
        """Return coefficient and bounds of the ratio."""
        tempered = super().numbers(h, t, op)
        untempered = {"trust_coefficient": 1.0, "max_ratio": math.inf}
        return {**tempered, **untempered} if h.trust_power == 1 else tempered


scale_by_trust_ratio = link_of(shared.ScaleByTrustRatio)
