"""Operations that torch does not round correctly, or not alike on all devices. Contract: A3."""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Half of the largest power of two: sums and differences of two smaller numbers are finite.
_TAME = 2.0**126
_ROOT_OF_HALF = 0x3FE6A09E667F3BCD
# The series of log2(m) in s = (m - 1) / (m + 1), |s| < .18, and of 2^f in |f| <= 1/2, to float64's last bits.
_LOG2 = [2 / math.log(2) / (2 * k + 1) for k in range(12)]
_EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(15)]


class _Eager(threading.local):
    """Whether values may be read in this thread, which is impossible in a graph."""

    looks = False


_EAGER = _Eager()


@contextlib.contextmanager
def looking_at_numbers() -> Iterator[None]:
    """Let `is_tame` read values, in plain steps, which are not traced."""
    before, _EAGER.looks = _EAGER.looks, True
    try:
        yield
    finally:
        _EAGER.looks = before


def is_tame(x: Tensor) -> bool:
    """Whether float32 numbers are known to be finite and far from the largest, so that checks can be skipped.

    It is only used in plain steps on a CPU, where reading values is cheap. A pass with a truth value for each
    element takes longer there than five passes of arithmetic, and both extremes are found in half a pass.
    """
    if not _EAGER.looks or type(x) is not Tensor or x.device.type != "cpu" or not x.numel():
        return False
    low, high = torch.aminmax(x)
    return -_TAME < low.item() and high.item() < _TAME


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, correctly rounded to float32."""
    # torch's vectorised float32 sqrt on CPU may be off by one bit. NumPy's is right, and so is a root through
    # float64. A generated kernel has the float32 root, which is the same number.
    if type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32 and not x.requires_grad:
        root = torch.empty_like(x)
        with np.errstate(all="ignore"):
            np.sqrt(x.numpy(), out=root.numpy())
        return root
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def sign(x: Tensor) -> Tensor:
    """Return the sign of float32 `x`, with NaN for NaN and +0 for -0, unlike `torch.sign`."""
    u = (x > 0).to(torch.float32) - (x < 0).to(torch.float32)
    # Triton's isnan flushes subnormal numbers before it looks.
    return torch.where(x == x, u, x)


def power(x: Tensor, y: Tensor | float) -> Tensor:
    """Return x^y for float32 x, rounded once from float64, which is almost always the nearest number.

    It uses operations that every device rounds alike, so the bits are the same everywhere.
    """
    size, y = x.to(torch.float64).abs(), y.to(torch.float64) if isinstance(y, Tensor) else float(y)
    exponent = (size.view(torch.int64) - _ROOT_OF_HALF) >> 52
    mantissa = (size.view(torch.int64) - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    # Past these bounds float32 has 0 and infinity.
    z = torch.clamp((exponent.to(torch.float64) + s * _series(_LOG2, s * s)) * y, -300.0, 300.0)
    whole = torch.floor(z + 0.5)
    unit = ((whole.to(torch.int64) + 1023) << 52).view(torch.float64)
    made = (_series(_EXP2, z - whole) * unit).to(torch.float32)
    none, all_of_it = (_if(y > 0, a, _if(y < 0, b, 1.0)) for a, b in ((0.0, math.inf), (math.inf, 0.0)))
    made = torch.where(size == 0, none, torch.where(size == math.inf, all_of_it, made))
    made = torch.where(x < 0, made * _sign_of_power(y), made)
    return torch.where(size >= 0, made, _if(y == 0, 1.0, math.nan))


def _series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Return the sum of coefficients times powers of float64 x."""
    *others, last = coefficients
    made = x * last
    for c in others[:0:-1]:
        made = (made + c) * x
    return made + others[0]


def _sign_of_power(y: Tensor | float) -> Tensor | float:
    """Return the sign of y-th powers of negative numbers, or NaN if there are none."""
    # Any: for a float or an array.
    floor: Any = math.floor if isinstance(y, float) else torch.floor
    is_odd = floor(y * 0.5) * 2.0 != y
    return _if(floor(y) == y, _if(is_odd, -1.0, 1.0), math.nan)


def _if(holds: Tensor | bool, x: Tensor | float, y: Tensor | float) -> Tensor | float:
    return torch.where(holds, x, y) if isinstance(holds, Tensor) else (x if holds else y)
