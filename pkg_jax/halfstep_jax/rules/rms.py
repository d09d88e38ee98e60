"""The second moment alone as an Optax transform. Contract: A16."""

from halfstep.rules.rms import ScaleByRms
from halfstep_jax.transform import transform_of

scale_by_rms = transform_of(ScaleByRms)
