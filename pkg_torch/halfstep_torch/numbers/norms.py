"""Norms of whole arrays, in float32, which neither underflow nor overflow. Contract: L1."""

import math

import torch
from torch import Tensor

from halfstep.op import LARGE_NORM, SCALE_BITS
from halfstep_torch.numbers.exact import sqrt

# Exponent fields between which both 2^e and 2^-e are normal numbers.
_LOWEST, _HIGHEST = 1, 253
_SCALE = 2.0**-SCALE_BITS


def norm(x: Tensor, length: int | None = None) -> Tensor:
    """Return the Euclidean norm of an array in float32, whatever its dtype (contract L1).

    The sum is torch's, rounded in an order of its own: pairwise, where `torch.linalg.vector_norm` adds one
    after the other on CPU, and is 1 % off at 1e8 elements. A long array is cut into pieces of `length`, each
    with an exponent of its own.

    Example:
        >>> norm(torch.tensor([3e-30, -4e-30])).item()
        5.000000015855384e-30
    """
    return norms(x, length)[0]


def norms(x: Tensor, length: int | None = None) -> Tensor:
    """Return the norm of an array x, and the norm of 2^-64 x, which is finite where every element of x is."""
    pieces = x.reshape(-1).split(length or piece_length(x.device))
    if len(pieces) == 1:
        field, total = _squares(pieces[0].to(torch.float32))
        return with_moved(_power_of_two(field), sqrt(total))
    # Made before the pieces are: small results between large temporaries keep a heap from shrinking.
    fields = torch.empty(len(pieces), dtype=torch.int32, device=x.device)
    sums = torch.empty(len(pieces), dtype=torch.float32, device=x.device)
    for i, piece in enumerate(pieces):
        fields[i], sums[i] = _squares(piece.to(torch.float32))
    field = fields.amax(0)
    # Exact, or below a rounding error: what is 2^-63 of the largest does not count.
    total = (sums * _power_of_two((127 + 2 * (fields - field)).clamp(min=0))).sum(0)
    return with_moved(_power_of_two(field), sqrt(total))


def with_moved(unit: Tensor, root: Tensor) -> Tensor:
    """Return `norms`, given a power of two and the norm in it as a unit."""
    return torch.stack([unit, unit * _SCALE]) * root


def norms_of_parts(parts: Tensor) -> Tensor:
    """Return `norms` of an array, given those of its parts in rows."""
    return torch.stack([norm(column) for column in parts.unbind(-1)])


def in_range(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm in its range and s, which made it so: 2^-64 for finite x of a norm above 2^100."""
    whole, moved = norms.unbind()
    is_large = (whole > LARGE_NORM) & (moved < math.inf)
    return torch.where(is_large, moved, whole), torch.where(is_large, _SCALE, 1.0)


def piece_length(device: torch.device) -> int:
    """Return how many elements are added up at once: on CPU, what fits a cache."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def _squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponent field 127 + e of the largest magnitude, int32, and sum((x 2^-e)^2), float32."""
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    field = (largest.view(torch.int32) >> 23).clamp(_LOWEST, _HIGHEST)
    scaled = x * _power_of_two(254 - field)
    return field, (scaled * scaled).sum()


def _power_of_two(field: Tensor) -> Tensor:
    """Return the float32 numbers of exponent fields, with no mantissa."""
    return (field << 23).view(torch.float32)
