"""Codes on a straight line in the eighth root, for second moments.

Contract: F16.
"""

import math

import numpy as np
import torch
from torch import Tensor

from halfstep.storage.unsigned_roots import FIELDS, GUESS, LEAST, PLACE_BITS, STEPS
from halfstep_torch.storage.base_codes import NAN_SCALE, Codes

_ONE = 1 << PLACE_BITS
# Patterns of the smallest number whose root is taken, and of 4.
_LEAST, _MOST = np.array([LEAST, 4.0], np.float32).view(np.int32).tolist()


class RootCodes(Codes):
    """Eighth powers of evenly spaced numbers, times the power of two of their block."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return codes of the root, rounded; there is no zero."""
        assert scale is not None
        y = x * ((254 - scale) << 23).view(torch.float32)
        # As integers: NaN becomes a number; a clamp of floats, which keeps NaN, takes far longer on a CPU.
        # What is not finite marks its block, where codes are 0.
        root = eighth_root(y.view(torch.int32).clamp(_LEAST, _MOST).view(torch.float32))
        place = (root * float(self.numbers.top * _ONE)).to(torch.int32) - self.numbers.above * _ONE
        drawn = _ONE // 2 if words is None else (words >> 16 & 0xFFFF).clamp(*FIELDS) * 2 + 1
        return (place + drawn >> PLACE_BITS).clamp(0, 255)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers: three squares and a product."""
        assert scale is not None
        x = (wide + self.numbers.above).to(torch.float32) * (1 / 256)
        for _ in range(3):
            x = x.square()
        unit = (scale << 23).view(torch.float32) * float(self.numbers.unit)
        return x * torch.where(scale == NAN_SCALE, math.nan, unit)


def eighth_root(y: Tensor) -> Tensor:
    """Return y^(1/8) to within 2.1 x 2^-24 of it: by products, sums and a shift, so the same everywhere.

    Two of Newton's steps to y^(-1/8), the first with a constant that halves what it leaves; then the root
    from that, and what it is short of by its own eighth power.

    Args:
        y: float32, from 2^-46 to 4.

    Example:
        >>> eighth_root(torch.tensor([2.0**-32]))
        tensor([0.0625])

    Source: ours (contract F16).
    """
    x = (GUESS - (y.view(torch.int32) >> 3)).view(torch.float32)
    eighth = y * 0.125
    for c in STEPS:
        # Of x * x the compiler evaluates x twice, and so on in each step: that compiles for minutes.
        fourth = x.square().square()
        x = x * (c - (eighth * fourth) * fourth)
    square = x.square()
    root = y * (square.square() * (square * x))
    return root + root * (0.875 * (1.0 - root * x))
