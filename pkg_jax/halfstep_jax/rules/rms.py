"""The second moment alone as an Optax transform. Contract: A16."""

from halfstep.recipes import takes_recipe
from halfstep.rules.rms import ScaleByRms
from halfstep_jax.transform import transform_of

scale_by_rms = takes_recipe(transform_of(ScaleByRms))
