"""Arithmetic that torch has to be helped with to round correctly. Contract: A3."""

import torch
from torch import Tensor


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, correctly rounded to float32."""
    # torch's vectorised float32 sqrt on CPU may be off by one bit in eager mode; through float64 it is right,
    # and compiled code emits the machine's own square root, which is right at once.
    if torch.compiler.is_compiling():
        return torch.sqrt(x)
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def sign(x: Tensor) -> Tensor:
    """Return the sign of float32 `x`; unlike `torch.sign`, NaN for NaN and +0 for -0."""
    u = (x > 0).to(torch.float32) - (x < 0).to(torch.float32)
    # Triton's isnan flushes subnormal numbers before it looks.
    return torch.where(x == x, u, x)
