"""The number of second moments at the ends of their codes, and of gradients outside. Contract: F16, F17."""

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.diagnosis import end_codes, limits
from halfstep_torch.storage.stored_moment import StoredMoment


def count_at_ends(
    second: StoredMoment, first: StoredMoment, state: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the numbers of elements at the smallest and the largest number of a format that stops there.

    The result is None for other formats, or if `state` lacks their keys. An
    element without a first moment has had no gradient, and does not count as smallest.
    """
    ends = end_codes(second.format.dtype)
    if ends is None or not {second.key, first.key} <= state.keys():
        return None
    lowest, highest = ends
    codes, moves = state[second.key], _nonzero(first, state[first.key])
    high = codes.new_zeros((), dtype=torch.int64) if highest is None else (codes == highest).sum()
    return ((codes == lowest) & moves).sum() if moves.shape == codes.shape else torch.zeros_like(high), high


def count_outside(grad: Tensor, dtype: str, scale: float = 1.0) -> Tensor:
    """Return the numbers of gradients with squares below and above a format, and of nonzero gradients.

    Args:
        grad: the gradient, times `scale`.
        dtype: the dtype of a second moment without scales.
        scale: the scale of the loss.
    """
    lowest, most = (scale * x for x in limits(dtype))
    size = grad.abs()
    return torch.stack([((size > 0) & (size < lowest)).sum(), (size > most).sum(), (size > 0).sum()])


def _nonzero(moment: StoredMoment, codes: Tensor) -> Tensor:
    """Return where the codes of a moment with a sign are not the codes of zero."""
    if moment.format.packed:
        return torch.stack([codes & 15, codes >> 4], -1).flatten(-2) != 0
    if codes.element_size() > 1:
        return codes != 0
    return (codes.view(torch.uint8) & 127) != 0
