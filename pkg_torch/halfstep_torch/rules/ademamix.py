"""The AdEMAMix update rule. Contract: A15."""

from halfstep.rules.ademamix import ScaleByAdemamix
from halfstep_torch.link import link_of

scale_by_ademamix = link_of(ScaleByAdemamix)
