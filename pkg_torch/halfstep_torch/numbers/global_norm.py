"""The norm of many tensors at once, in float32, or by sums of integers that do not depend on the order.

Contract: N1, N2.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.numbers.norms import norms, norms_of_parts, piece_length, with_moved

_INFINITY = 0x7F800000
# Squares below 2^48, with a sum below 2^63.
_CHUNK = 1 << 15


def global_norm(tensors: Sequence[Tensor], *, exact: bool = False) -> Tensor:
    """Return the norm of all tensors, on the device of the first (contract N1).

    torch computes and rounds the sums in its own order. With `exact` they are sums of integers (contract N2).

    Example:
        >>> global_norm([torch.tensor([3e-30]), torch.tensor([[-4e-30]])], exact=True).item()
        5.000000015855384e-30
    """
    return global_norms(tensors, exact=exact)[0]


def norms_of_each(tensors: Sequence[Tensor]) -> Tensor:
    """Return the `norms` of each array, on the device of the first."""
    made = torch.empty(len(tensors), 2, dtype=torch.float32, device=tensors[0].device)
    for i, x in enumerate(tensors):
        made[i] = norms(x)
    return made


def largest_pattern(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bits of the largest magnitude, int32. NaN is the largest, and no elements give 0."""
    zero = torch.zeros((), dtype=torch.int32, device=device)
    of_pieces = (_pattern(piece).amax().to(device) for x in tensors for piece in _pieces(x))
    return torch.stack([zero, *of_pieces]).amax()


def sum_of_squares(tensors: Sequence[Tensor], largest: Tensor) -> Tensor:
    """Return the sum of all squares, in units of the last place of the largest: (low 32 bits, the rest)."""
    field = largest >> 23
    zero = torch.zeros(2, dtype=torch.int64, device=largest.device)
    pieces = (piece for x in tensors for piece in _pieces(x))
    sums = (_sum_of_piece(_pattern(piece), field.to(piece.device)).to(largest.device) for piece in pieces)
    return torch.stack([zero, *sums]).sum(0)


class Sums(NamedTuple):
    """The functions for norms of many tensors, in plain torch or others with the same bits."""

    norms: Callable[[Sequence[Tensor]], Tensor] = norms_of_each
    largest: Callable[[Sequence[Tensor], torch.device], Tensor] = largest_pattern
    squares: Callable[[Sequence[Tensor], Tensor], Tensor] = sum_of_squares


PLAIN_SUMS = Sums()


def global_norms(tensors: Sequence[Tensor], *, exact: bool = False, sums: Sums = PLAIN_SUMS) -> Tensor:
    """Return the norm over all tensors, and the norm of 2^-64 times them."""
    if not tensors:
        return torch.zeros(2, dtype=torch.float32)
    if not exact:
        return norms_of_parts(sums.norms(tensors))
    largest = sums.largest(tensors, tensors[0].device)
    return roots_of(sums.squares(tensors, largest), largest)


def roots_of(total: Tensor, largest: Tensor) -> Tensor:
    """Return both norms, given sums of squares and bits of the largest magnitude, for one array or many.

    The first axis of `total` has the low 32 bits and the rest, and the first axis of the result both norms.
    """
    field = largest >> 23
    low, high = total.unbind()
    root = sqrt(_as_float32(high + (low >> 32), low & 0xFFFFFFFF))
    both = with_moved((field << 23).view(torch.float32), root * 2.0**-23)
    both = torch.where(field == 0, 0.0, both)
    special = torch.where(largest == _INFINITY, torch.inf, torch.nan)
    return torch.where(largest >= _INFINITY, special, both)


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """Return pieces of an array, each read at once."""
    return x.detach().reshape(-1).split(piece_length(x.device)) if x.numel() else ()


def _pattern(x: Tensor) -> Tensor:
    """Return the bits of float32 numbers without their sign."""
    return x.to(torch.float32).view(torch.int32) & 0x7FFFFFFF


def _sum_of_piece(bits: Tensor, field: Tensor) -> Tensor:
    exponent = bits >> 23
    mantissa = torch.where(exponent > 0, (bits & 0x7FFFFF) | 1 << 23, 0)
    shift = (field - exponent).clamp_(max=25)
    r = ((mantissa + ((1 << shift) >> 1)) >> shift).to(torch.int64)
    chunks = torch.stack([chunk.sum() for chunk in (r * r).split(_CHUNK)])
    return torch.stack([(chunks & 0xFFFFFFFF).sum(), (chunks >> 32).sum()])


def _as_float32(high: Tensor, low: Tensor) -> Tensor:
    """Return the top 32 bits of 2^32 high + low as float32, in their place."""
    powers = 1 << torch.arange(62, device=high.device)
    length = (high.unsqueeze(-1) >= powers).sum(-1)
    bits = torch.where(length > 0, (high << 32 - length.clamp(max=32)) | (low >> length), low)
    # Past 2^64 the top 32 bits lie in the high half alone.
    bits = torch.where(length > 32, high >> (length - 32).clamp(min=0), bits)
    return bits.to(torch.float32) * ((127 + length) << 23).to(torch.int32).view(torch.float32)
