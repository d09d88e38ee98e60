"""The Adan update rule as an Optax transform. Contract: A11."""

from halfstep.recipes import takes_recipe
from halfstep.rules.adan import ScaleByAdan
from halfstep_jax.transform import transform_of

scale_by_adan = takes_recipe(transform_of(ScaleByAdan))
