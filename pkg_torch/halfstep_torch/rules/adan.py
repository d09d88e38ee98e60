"""The Adan update rule. Contract: A11."""

from halfstep.rules.adan import ScaleByAdan

scale_by_adan = ScaleByAdan
