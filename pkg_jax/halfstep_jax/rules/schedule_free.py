"""Schedule-free averaging as an Optax transform. Contract: A17."""

from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep_jax.transform import transform_of

scale_by_schedule_free = transform_of(ScaleByScheduleFree)
