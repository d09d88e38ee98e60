"""The second moment alone. Contract: A16."""

from halfstep.recipes import takes_recipe
from halfstep.rules.rms import ScaleByRms

scale_by_rms = takes_recipe(ScaleByRms)
