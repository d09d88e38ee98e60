"""Operations that torch does not round correctly by itself. Contract: A3."""

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# Half of the largest power of two: sums and differences of two smaller numbers are finite.
_TAME = 2.0**126


class _Eager(threading.local):
    """Whether numbers may be looked at in this thread, which no graph can do."""

    looks = False


_EAGER = _Eager()


@contextlib.contextmanager
def looking_at_numbers() -> Iterator[None]:
    """Let `is_tame` look at numbers: in plain steps, which nothing traces."""
    before, _EAGER.looks = _EAGER.looks, True
    try:
        yield
    finally:
        _EAGER.looks = before


def is_tame(x: Tensor) -> bool:
    """Whether float32 numbers are known to be finite and far from the largest, so that checks can be skipped.

    Only where seeing costs nothing: in plain steps on a CPU. There a pass that makes a truth value of each
    element takes longer than five that compute, and the two ends of an array are found in half a pass.
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
    """Return the sign of float32 `x`; unlike `torch.sign`, NaN for NaN and +0 for -0."""
    u = (x > 0).to(torch.float32) - (x < 0).to(torch.float32)
    # Triton's isnan flushes subnormal numbers before it looks.
    return torch.where(x == x, u, x)
