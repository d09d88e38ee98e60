"""Schedule-free averaging. Contract: A17."""

from halfstep.recipes import takes_recipe
from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep_torch.link import link_of

scale_by_schedule_free = takes_recipe(link_of(ScaleByScheduleFree))
