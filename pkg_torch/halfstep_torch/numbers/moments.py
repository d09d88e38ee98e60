"""Moments: exponential moving averages and their bias correction, in float32.

Contract: section M. `formats.py` has the storage of moments.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T", Tensor, float)
_COUNT_BITS = 32


class DecayRate(NamedTuple):
    """The decay rate of an average, with b and 1 - b in float32 for `ema`. In a product it is the rate."""

    b: float
    one_minus_b: float

    @classmethod
    def of(cls, b: float) -> "DecayRate":
        """Return both numbers of a rate."""
        b32 = np.float32(b)
        return cls(float(b32), float(np.float32(1) - b32))

    def __mul__(self, x: T) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.b * x

    __rmul__ = __mul__  # pyright: ignore[reportAssignmentType]


def ema(average: Tensor, value: Tensor, rate: DecayRate) -> Tensor:
    """Return (b average) + ((1 - b) value) in float32, each operation rounded (contract M1).

    Example:
        >>> import torch
        >>> ema(torch.zeros(1), torch.ones(1), DecayRate.of(0.75))
        tensor([0.2500])
    """
    # Written out: lerp, addcmul and add(alpha=) may fuse the product and the sum.
    return (rate.b * average) + (rate.one_minus_b * value)


@functools.lru_cache(maxsize=1024)
def bias_correction(b: float, count: int) -> np.float32:
    """Return 1 - b^count by the complement binary power, of float32 numbers (contract M2).

    Example:
        >>> print(bias_correction(0.5, 2))
        0.75
    """
    power, q = np.float32(1) - np.float32(b), np.float32(0)
    while count:
        if count & 1:
            q = _with_power(q, power)
        power = _squared(power)
        count >>= 1
    return q


def bias_corrections(b: Tensor, counts: Tensor) -> Tensor:
    """Return the same for float32 and int64 tensors, with the same number of turns for each count."""
    power, q = 1 - b, torch.zeros_like(counts, dtype=torch.float32)
    for bit in range(_COUNT_BITS):
        q = torch.where((counts >> bit & 1) != 0, _with_power(q, power), q)
        power = _squared(power)
    return q


def _with_power(q: Any, power: Any) -> Any:  # tensors, or float32 numbers of NumPy
    """Return 1 - (1 - q) (1 - power)."""
    return q + power * (1 - q)


def _squared(power: Any) -> Any:  # a float, or an array of them
    """Return 1 - (1 - power)^2."""
    return 2 * power - power * power
