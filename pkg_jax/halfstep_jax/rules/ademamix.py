"""The AdEMAMix update rule as an Optax transform. Contract: A15."""

from halfstep.rules.ademamix import ScaleByAdemamix
from halfstep_jax.transform import transform_of

scale_by_ademamix = transform_of(ScaleByAdemamix)
