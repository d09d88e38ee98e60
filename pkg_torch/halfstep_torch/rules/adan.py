"""The Adan update rule. Contract: A11."""

from halfstep.recipes import takes_recipe
from halfstep.rules.adan import ScaleByAdan

scale_by_adan = takes_recipe(ScaleByAdan)
