"""Schedule-free averaging as an Optax transform. Contract: A17."""

from halfstep.recipes import takes_recipe
from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep_jax.transform import transform_of

scale_by_schedule_free = takes_recipe(transform_of(ScaleByScheduleFree))
