"""LAMB's trust ratio as an Optax transform: one factor for each leaf, from the norms of weight and update.

Contract: section L.
"""

from halfstep.rules import trust_ratio
from halfstep_jax.rule import OfNorms
from halfstep_jax.transform import transform_of


class ScaleByTrustRatio(trust_ratio.ScaleByTrustRatio, OfNorms):
    """The rule of `scale_by_trust_ratio`: in `jax.shard_map`, arrays may be cut over axes of a mesh."""


class ScaleByTemperedTrustRatio(trust_ratio.ScaleByTemperedTrustRatio, OfNorms):
    """The rule of `scale_by_tempered_trust_ratio`, likewise."""

    name = "lamb16"


scale_by_trust_ratio = transform_of(ScaleByTrustRatio)
scale_by_tempered_trust_ratio = transform_of(ScaleByTemperedTrustRatio)
