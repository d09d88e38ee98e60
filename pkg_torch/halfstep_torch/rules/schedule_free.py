"""Schedule-free averaging. Contract: A17."""

from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep_torch.links.link import link_of

scale_by_schedule_free = link_of(ScaleByScheduleFree)
