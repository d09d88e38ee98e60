"""Schedule-free averaging. Contract: A17."""

from halfstep.recipes import takes_recipe
from halfstep.rules.schedule_free import ScaleByScheduleFree

scale_by_schedule_free = takes_recipe(ScaleByScheduleFree)
