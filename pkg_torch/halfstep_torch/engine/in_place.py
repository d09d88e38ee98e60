"""Rounding a tensor in place: in pieces in eager mode, or by one compiled kernel.

Either way no temporary of the size of the tensor is made.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep.random_words import leaf_id
from halfstep_torch.distributed.window import Window
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import as_int32, leaf_keys, whole_words, words_at
from halfstep_torch.numbers.rounding import round_value

# Elements of a piece. On a CPU, the temporaries of a piece must stay in a cache. Elsewhere, launching the
# kernels of a piece must be a small part of running them.
_PIECE, _PIECE_ELSEWHERE = 1 << 17, 1 << 22

New = Callable[..., Tensor]
"""From float32 pieces of tensors to the float32 value that is to be rounded."""


def round_in_place(
    x: Tensor,
    others: tuple[Tensor, ...],
    new: New,
    seed: int,
    step: int,
    leaf: str,
    role: int,
    window: Window | None = None,
) -> None:
    """Replace x by stochastic(new(x, others...)), by R5, with the words of its row-major indices.

    In float32 nothing is rounded. The words are of the leaf `leaf` at `step`; `role` shares its words with no
    other. A compiled kernel wants x of 16 bits, and all tensors in row-major order. Where x is a shard,
    `window` is what of an array it has, and the indices are those in the array.
    """
    k0, k1 = as_int32(leaf_keys(seed, [step], [leaf_id(leaf)], [role])[0]).tolist()
    name = dtype_name(x.dtype)
    cut = window is not None and not window.is_full
    for offset, part, *other_parts in _pieces(x, *others):
        value = new(part.to(torch.float32), *(other.to(torch.float32) for other in other_parts))
        words = None
        if name != "float32" and window is not None and cut:
            local = torch.arange(offset, offset + part.numel(), device=part.device)
            words = words_at(k0, k1, window.indices(local)).view(part.shape)
        elif name != "float32":
            words = whole_words(k0, k1, part.shape, part.device, offset)
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
