"""The second moment alone. Contract: A16."""

from halfstep.rules.rms import ScaleByRms
from halfstep_torch.links.link import link_of

scale_by_rms = link_of(ScaleByRms)
