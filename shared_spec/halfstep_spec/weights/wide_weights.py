"""Weights of more bits than the model sees, which the links read and update. Contract: P5.

Vectors: weights, lamb.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.rounding import decode
from halfstep_spec.weights.split_weights import SplitWeight, nearest_away
from halfstep_spec.weights.weight_rule import WeightRule, update_between


@dataclasses.dataclass(frozen=True)
class SplitParams(WeightRule):
    """Keep further bits of the mantissa beside the weight.

    Attributes:
        extra_bits: 8 or 16.
    """

    extra_bits: int = 16

    @property
    def split(self) -> SplitWeight:
        """How both parts make one weight."""
        return SplitWeight(self.dtype, self.extra_bits)

    @property
    def extra_dtype(self) -> str:
        """Of the low bits."""
        return str(self.split.extra_dtype)

    def init(self, p) -> np.ndarray:
        """Return zeros: the weight is p itself."""
        return np.zeros(p.shape, self.split.extra_dtype)

    def join(self, p, extra) -> np.ndarray:
        """Return the weight of both parts."""
        return self.split.join(p, extra)

    def emit(self, p, u, extra, words):
        """Return p' - p and the low bits of w + u, rounded to the wider format."""
        shown, extra = self.split.split(self.join(p, extra) + u, words)
        return update_between(decode(p, self.dtype), decode(shown, self.dtype)), extra


@dataclasses.dataclass(frozen=True)
class KeepMasterParams(WeightRule):
    """Keep a float32 copy of the weight."""

    @property
    def extra_dtype(self) -> str:
        """Of the copy."""
        return "float32"

    def init(self, p) -> np.ndarray:
        """Return the copy."""
        return decode(p, self.dtype)

    def join(self, p, extra) -> np.ndarray:
        """Return the copy; where it does not show p, which then was written from outside, p (contract P7)."""
        p32, shown = decode(p, self.dtype), decode(nearest_away(extra, self.dtype), self.dtype)
        return np.where(shown == p32, extra, p32)

    def emit(self, p, u, extra, words):
        """Return p' - p and w + u, p' being w + u rounded to nearest, ties away from zero."""
        w = self.join(p, extra) + u
        shown = nearest_away(w, self.dtype)
        return update_between(decode(p, self.dtype), decode(shown, self.dtype)), w
