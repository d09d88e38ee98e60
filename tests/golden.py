"""The golden vectors, read once."""

from halfstep_spec import SPEC_VERSION
from halfstep_spec.vectors import load

VECTORS = load(SPEC_VERSION)
