"""Norms of whole arrays, in float32, which neither underflow nor overflow.

Contract: L1. Many arrays may lie end to end, and an array may come in pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep_torch.numbers.exact import sqrt

# Exponent fields between which both 2^e and 2^-e are normal numbers.
_LOWEST, _HIGHEST = 1, 253


class Squares(NamedTuple):
    """Scaled sums of squares, one per array.

    Attributes:
        field: int32, the exponent field of the largest magnitude: 127 + e.
        sum: float32, sum((x 2^-e)^2).
    """

    field: Tensor
    sum: Tensor


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of an array: n = 2^e sqrt(sum((x 2^-e)^2)), e the exponent of max |x|.

    In float32, whatever the dtype of `x`. The two products with a power of two are exact, so that nothing
    underflows at 1e-20 or overflows at 1e20, where plain squares do. The sum is torch's, rounded in an order
    of its own: pairwise, where `torch.linalg.vector_norm` adds one after the other on CPU, and is 1 % off at
    1e8 elements.

    Args:
        x: float32, bfloat16 or float16, of any shape.

    Returns:
        A float32 0-d tensor: 0 of an array that is empty or all zeros, NaN where an element is NaN, infinity
        where one is infinite.

    Example:
        >>> norm(torch.tensor([3e-30, -4e-30])).item()
        5.000000015855384e-30

    Source: ours; the scaling is that of BLAS's `nrm2`, by a power of two (contract L1).
    """
    return norms([squares(x.to(torch.float32).reshape(-1), [x.numel()])])[0]


def squares(x: Tensor, lengths: Sequence[int]) -> Squares:
    """Return the scaled sums of squares of arrays that lie end to end.

    Args:
        x: float32, one row.
        lengths: of the arrays; together as long as `x`.
    """
    largest = torch.stack([_largest(part) for part in x.split(list(lengths))])
    field = (largest.view(torch.int32) >> 23).clamp(_LOWEST, _HIGHEST)
    down = per_element(_power_of_two(254 - field), lengths)
    scaled = x * down
    return Squares(field, torch.stack([part.sum() for part in (scaled * scaled).split(list(lengths))]))


def norms(pieces: Sequence[Squares]) -> Tensor:
    """Return the norms of arrays, given the sums of each of their pieces."""
    fields, sums = torch.stack([piece.field for piece in pieces]), torch.stack([x.sum for x in pieces])
    field = fields.amax(0)
    # Exact, or below a rounding error: what is 2^-63 of the largest does not count.
    total = (sums * _power_of_two((127 + 2 * (fields - field)).clamp(min=0))).sum(0)
    return _power_of_two(field) * sqrt(total)


def per_element(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return a number for each array as one for each of their elements; of a single array, as it is, 0-d."""
    if len(lengths) == 1:
        return values[0]
    repeats = torch.tensor(lengths, device=values.device)
    return values.repeat_interleave(repeats, output_size=sum(lengths))


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _power_of_two(field: Tensor) -> Tensor:
    """Return the float32 numbers of exponent fields, with no mantissa."""
    return (field << 23).view(torch.float32)
