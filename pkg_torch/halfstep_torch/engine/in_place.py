"""Rounding a tensor in place: in pieces in eager mode, or by one compiled kernel.

Either way no temporary of the size of the tensor is made.
"""

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep.random_words import leaf_id, mix
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.inductor import compile_options, compiling, own_code
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import as_int32, leaf_keys, whole_words, words_at
from halfstep_torch.numbers.rounding import round_value

# Elements of a piece. On a CPU, the temporaries of a piece must stay in a cache. Elsewhere, launching the
# kernels of a piece must be a small part of running them.
_PIECE, _PIECE_ELSEWHERE = 1 << 17, 1 << 22
# Fewer elements than these are no work for a kernel; nor are more, whose indices have two halves.
_SMALLEST, _LARGEST = 1 << 12, 1 << 31

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
    compiled: bool = False,
    window: Window | None = None,
) -> None:
    """Replace x by stochastic(new(x, others...)), by R5, with the words of its row-major indices.

    In float32 nothing is rounded. The words are of the leaf `leaf` at `step`; `role` shares its words with no
    other. A compiled kernel wants x of 16 bits, and all tensors in row-major order. Where x is a shard,
    `window` is what of an array it has, and the indices are those in the array.
    """
    k0, k1 = as_int32(leaf_keys(seed, [step], [leaf_id(leaf)], [role])[0]).tolist()
    name = dtype_name(x.dtype)
    in_order = all(tensor.is_contiguous() for tensor in (x, *others))
    cut = window is not None and not window.is_full
    if compiled and not cut and in_order and name != "float32" and _SMALLEST <= x.numel() < _LARGEST:
        keys = torch.tensor([k0, k1], dtype=torch.int32, device=x.device)
        flat = tuple(tensor.view(-1) for tensor in (x, *others))
        rounding_kernel(new, name, len(others), x.device)(*flat, keys)
        return
    for offset, part, *other_parts in _pieces(x, *others):
        value = new(part.to(torch.float32), *(other.to(torch.float32) for other in other_parts))
        words = None
        if name != "float32" and window is not None and cut:
            local = torch.arange(offset, offset + part.numel(), device=part.device)
            words = words_at(k0, k1, window.indices(local)).view(part.shape)
        elif name != "float32":
            words = whole_words(k0, k1, part.shape, part.device, offset)
        part.copy_(round_value(value, name, words, saturate=False))


@functools.cache
def rounding_kernel(new: New, name: str, others: int, device: torch.device) -> Callable:
    """Return a compiled function (x, others..., keys) that rounds flat tensors in place, of any length."""

    def round_flat(x: Tensor, *rest: Tensor) -> None:
        *other_parts, keys = rest
        k0, k1 = keys.unbind()
        words = mix(XP, torch.arange(x.numel(), dtype=torch.int32, device=x.device) * k0 + k1)
        value = new(x.to(torch.float32), *(other.to(torch.float32) for other in other_parts))
        x.copy_(round_value(value, name, words, saturate=False))

    options = compile_options(device)
    kernel = torch.compile(own_code(round_flat), dynamic=True, fullgraph=True, options=options)
    # Long enough that Inductor, which decides on the length it is first shown, runs the kernel in parallel.
    dtype = getattr(torch, name)
    scratch = [torch.zeros(1 << 20, dtype=dtype, device=device) for _ in range(1 + others)]
    with compiling():
        kernel(*scratch, torch.zeros(2, dtype=torch.int32, device=device))
    return kernel


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
