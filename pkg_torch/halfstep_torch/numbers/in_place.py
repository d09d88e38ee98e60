"""Rounding a tensor in place, piece by piece: no temporary of its size."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import as_int32, leaf_id, leaf_keys, whole_words
from halfstep_torch.numbers.rounding import round_value

# Elements of a piece: on a CPU few enough for the temporaries of one to stay in a cache, elsewhere enough for
# launching its kernels to be a small part of running them.
_PIECE, _PIECE_ELSEWHERE = 1 << 17, 1 << 22


def round_in_place(
    x: Tensor,
    others: tuple[Tensor, ...],
    new: Callable[..., Tensor],
    seed: int,
    step: int,
    leaf: str,
    role: int,
) -> None:
    """Replace x by stochastic(new(x, others...)), by R5, with the words of its row-major indices.

    Args:
        x: of the dtype that is rounded to; any layout. In float32 nothing is rounded.
        others: of the shape of x.
        new: from float32 pieces of x and of the others to the float32 value to be rounded.
        seed: of the words, and
        step: their step,
        leaf: the name of their leaf,
        role: their role.
    """
    k0, k1 = as_int32(leaf_keys(seed, [step], [leaf_id(leaf)], [role])[0]).tolist()
    name = dtype_name(x.dtype)
    for offset, part, *of_others in _pieces(x, *others):
        value = new(part.to(torch.float32), *(other.to(torch.float32) for other in of_others))
        words = None if name == "float32" else whole_words(k0, k1, part.shape, part.device, offset)
        part.copy_(round_value(value, name, words, saturate=False))


def _pieces(*tensors: Tensor) -> Iterator[tuple]:
    """Yield (row-major index of the first element, pieces of every tensor), cut along the first axis."""
    if not tensors[0].dim():
        tensors = tuple(x.reshape(1) if i else x.view(1) for i, x in enumerate(tensors))
    if all(x.is_contiguous() for x in tensors):
        tensors = tuple(x.view(-1) for x in tensors)
    length, *rest = tensors[0].shape
    width = math.prod(rest)
    piece = _PIECE if tensors[0].device.type == "cpu" else _PIECE_ELSEWHERE
    rows = max(piece // max(width, 1), 1)
    for start in range(0, length if width else 0, rows):
        yield start * width, *(x[start : start + rows] for x in tensors)
