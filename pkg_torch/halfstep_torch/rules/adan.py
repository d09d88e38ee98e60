"""The Adan update rule. Contract: A11."""

from halfstep.recipes import takes_recipe
from halfstep.rules.adan import ScaleByAdan
from halfstep_torch.link import link_of

scale_by_adan = takes_recipe(link_of(ScaleByAdan))
