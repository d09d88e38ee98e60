"""The Adan update rule as an Optax transform. Contract: A11."""

from halfstep.rules.adan import ScaleByAdan
from halfstep_jax.transform import transform_of

scale_by_adan = transform_of(ScaleByAdan)
