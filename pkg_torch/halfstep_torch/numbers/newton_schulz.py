"""The Newton-Schulz factor of matrices, within a bound of the contract's because sums have torch's order.

Contract: A14.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfstep.rules.muon import Matrices


def newton_schulz(
    x: Tensor, matrices: Matrices, coefficients: Sequence[tuple], eps: float, dtype: str = "float32"
) -> Tensor:
    """Return the factors of matrices (A14) in float32, with their products in `dtype`."""
    stack = x.permute(matrices.order).reshape(matrices.stack)
    transposed = matrices.stack[1] > matrices.stack[2]
    stack = _normed(stack.mT if transposed else stack, eps).to(getattr(torch, dtype))
    with _without_tf32(x.device):
        for a, b, c in coefficients:
            gram = stack @ stack.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            stack = torch.baddbmm(stack, polynomial, stack, beta=a)
    stack = (stack.mT if transposed else stack).to(torch.float32)
    return stack.reshape(matrices.moved).permute(matrices.back)


def _normed(stack: Tensor, eps: float) -> Tensor:
    """Return matrices over their norms, without a square that overflows."""
    top = stack.abs().amax((1, 2), keepdim=True)
    scaled = stack / torch.where(top > 0, top, 1)
    norm = scaled.square().sum((1, 2), keepdim=True).sqrt()
    return scaled / torch.maximum(norm, eps / top.clamp(min=torch.finfo(torch.float32).tiny))


@contextlib.contextmanager
def _without_tf32(device: torch.device) -> Iterator[None]:
    """Keep GPUs from rounding float32 factors to TF32, which the factor magnifies."""
    if device.type != "cuda" or not torch.backends.cuda.matmul.allow_tf32:
        yield
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True
