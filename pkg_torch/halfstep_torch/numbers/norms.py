"""Norms of whole arrays, in float32, which neither underflow nor overflow. Contract: L1.

The order of every sum is fixed, so plain steps and kernels, with any number of threads, have equal bits:

    piece   1024 elements in row-major order, fewer in the last: squares in units of a power of two,
            added by halves in float32, and then in float64, which holds every power
    array   the sums of pieces in rows of 1024, row after row, then by halves, in float64
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.op import LARGE_NORM, SCALE_BITS

PIECE = 1024
"""Elements with squares added in float32, and pieces in a row of their sums."""
# Exponent fields between which both 2^e and 2^-e are normal numbers.
_LOWEST, _HIGHEST = 1, 253
_SCALE = 2.0**-SCALE_BITS


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of an array in float32, for any dtype (contract L1).

    Example:
        >>> norm(torch.tensor([3e-30, -4e-30])).item()
        5.000000015855384e-30
    """
    return norms(x)[0]


def norms(x: Tensor) -> Tensor:
    """Return the norms of an array x and of 2^-64 x. The second is finite if all elements are."""
    return norms_of_sums(sum_of_pieces(squares_of_pieces(x)))


def norms_of_sums(sums: Tensor) -> Tensor:
    """Return `norms`, along a new first axis, given sums of squares in float64."""
    roots = sums.sqrt()
    return torch.stack([roots, roots * _SCALE]).to(torch.float32)


def squares_of_pieces(x: Tensor) -> Tensor:
    """Return the sum of squares of each piece of an array, float64."""
    x = x.reshape(-1)
    whole = x.numel() // PIECE * PIECE
    sums = torch.empty(-(-x.numel() // PIECE), dtype=torch.float64, device=x.device)
    length = piece_length(x.device)
    for start in range(0, whole, length):
        rows = x[start : min(start + length, whole)].view(-1, PIECE)
        sums[start // PIECE :][: len(rows)] = _squares(rows.to(torch.float32))
    if whole < x.numel():
        sums[-1] = _squares(_padded(x[whole:].to(torch.float32)))
    return sums


def sum_of_pieces(sums: Tensor) -> Tensor:
    """Return the sum of the results of `squares_of_pieces`, in a fixed order."""
    if len(sums) > PIECE:
        first, *rows = sums.split(PIECE)
        added = first.clone()
        for row in rows:
            added[: len(row)] += row
        sums = added
    return _by_halves(_padded(sums))


def with_moved(unit: Tensor, root: Tensor) -> Tensor:
    """Return `norms`, given a power of two and the norm in it as a unit."""
    return torch.stack([unit, unit * _SCALE]) * root


def norms_of_parts(parts: Tensor) -> Tensor:
    """Return `norms` of an array, given the norms of its parts in rows."""
    return torch.stack([norm(column) for column in parts.unbind(-1)])


def in_range(norms: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the norm of s x and s, with s = 2^-64 for finite x with a norm above 2^100, else 1."""
    whole, moved = norms
    is_large = (whole > LARGE_NORM) & (moved < math.inf)
    return torch.where(is_large, moved, whole), torch.where(is_large, _SCALE, 1.0)


def piece_length(device: torch.device) -> int:
    """Return the number of elements added up at once. On a CPU they fit a cache."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def _power_of_two(field: Tensor) -> Tensor:
    """Return the float32 numbers of exponent fields, with no mantissa."""
    return (field << 23).view(torch.float32)


def _squares(x: Tensor) -> Tensor:
    """Return sum(x^2) along the last axis, a power of two long, in float64."""
    field = (x.abs().amax(-1).view(torch.int32) >> 23).clamp(_LOWEST, _HIGHEST)
    scaled = x * _power_of_two(254 - field).unsqueeze(-1)
    unit = _power_of_two(field).to(torch.float64)
    return _by_halves(scaled * scaled).to(torch.float64) * (unit * unit)


def _by_halves(x: Tensor) -> Tensor:
    """Return the sum along the last axis, a power of two long, adding its second half to the first."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _padded(x: Tensor) -> Tensor:
    """Return numbers of one axis with zeros up to a power of two, which change no sum of squares."""
    longer = 1 << max(len(x) - 1, 0).bit_length()
    return torch.nn.functional.pad(x, (0, longer - len(x))) if longer > len(x) else x
