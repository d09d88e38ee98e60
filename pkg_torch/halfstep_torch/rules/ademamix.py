"""The AdEMAMix update rule. Contract: A15."""

from halfstep.rules.ademamix import ScaleByAdemamix

scale_by_ademamix = ScaleByAdemamix
