"""The two comparisons of the repository, which a third backend has too."""

from halfstep_spec.compare import assert_same, differing, within_ulps

__all__ = ["assert_same", "differing", "within_ulps"]
