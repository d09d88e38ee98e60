"""The second moment alone. Contract: A16."""

from halfstep.recipes import takes_recipe
from halfstep.rules.rms import ScaleByRms
from halfstep_torch.link import link_of

scale_by_rms = takes_recipe(link_of(ScaleByRms))
