"""float32 copies of 16-bit weights and their gradients, and weights that are rounded from these.

Copies lie in rows, next to each other; a row has elements of one parameter. So one kernel rounds them all.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.random_words import leaf_id, mix
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.for_each import for_each
from halfstep_torch.engine.inductor import compile_options, compile_rows, mark_width
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import GOLDEN_RATIO, as_int32, leaf_keys
from halfstep_torch.numbers.rounding import round_value

_WIDTH = 256
# Elements that are rounded at once in eager mode: on a CPU, temporaries must stay in a cache.
_PIECE, _PIECE_ELSEWHERE = 1 << 17, 1 << 22
_SCRATCH = 1 << 20


class Float32Copies:
    """Of parameters of one device and one dtype of 16 bits, copies of weights and gradients.

    Args:
        params: the parameters, with gradients.
        memory: by device, what copies of a CPU were in before; it grows to the most that is asked for. (New
            memory costs a CPU more than stepping the weights in it.)

    Attributes:
        weights: of each parameter, a float32 tensor of its shape.
        grads: likewise.
    """

    def __init__(self, params: Sequence[Tensor], memory: dict[torch.device, Tensor]) -> None:
        self._params = [param.detach() for param in params]
        device = params[0].device
        self._lengths = [-(-param.numel() // _WIDTH) for param in params]
        count, kept = sum(self._lengths), memory.get(device)
        if kept is None or kept.shape[1] < count:
            kept = torch.empty(2, count, _WIDTH, device=device)
            if device.type == "cpu":
                memory[device] = kept
        self._rows, self._rows_of_grads = kept[0, :count], kept[1, :count]
        self.weights, self.grads = self._parts(self._rows), self._parts(self._rows_of_grads)
        for_each("copy_", self.weights, self._params)
        for_each("copy_", self.grads, [grad for param in params if (grad := param.grad) is not None])

    def _parts(self, rows: Tensor) -> list[Tensor]:
        """Return what rows have of each parameter, in its shape."""
        flat, start, parts = rows.view(-1), 0, []
        for param, length in zip(self._params, self._lengths, strict=True):
            parts.append(flat[start : start + param.numel()].view(param.shape))
            start += length * _WIDTH
        return parts

    def round(
        self,
        caller: str,
        seed: int,
        steps: Sequence[int],
        names: Sequence[str],
        role: int,
        choice: CompileChoice,
    ) -> None:
        """Round every weight from its copy, by R5, with the words of its row-major indices.

        Gradients are lost: the rounded weights take their memory on the way.
        """
        name, device = dtype_name(self._params[0].dtype), self._rows.device
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        kernel = functools.partial(_kernel, name, device, threads)
        out = self._rows_of_grads.view(-1).view(self._params[0].dtype)[: self._rows.numel()].view(-1, _WIDTH)
        rows = self._rows, out, *self._words(seed, steps, names, role, device)
        if len(self._rows) > 1 and choice.prepare(caller, device, self._rows.numel(), kernel):
            kernel()(*rows)
        else:
            piece = (_PIECE if device.type == "cpu" else _PIECE_ELSEWHERE) // _WIDTH
            for start in range(0, len(self._rows), piece):
                _round_rows(name, *(x[start : start + piece] for x in rows))
        for_each("copy_", self._params, self._parts(out))

    def _words(
        self, seed: int, steps: Sequence[int], names: Sequence[str], role: int, device: torch.device
    ) -> list[Tensor]:
        """Return of each row the index of its first element, and the keys of its words (contract W8)."""
        keys = leaf_keys(seed, steps, [leaf_id(name) for name in names], [role])
        k0, k1 = (np.repeat(column, self._lengths) for column in keys.T)
        first = np.concatenate([np.arange(length, dtype=np.uint64) * _WIDTH for length in self._lengths])
        k1 = k1 + GOLDEN_RATIO * (first >> np.uint64(32)).astype(np.uint32)
        return [torch.from_numpy(as_int32(x)).to(device) for x in (first, k0, k1)]


def _round_rows(name: str, new: Tensor, out: Tensor, first: Tensor, k0: Tensor, k1: Tensor) -> None:
    index = first[:, None] + torch.arange(_WIDTH, dtype=torch.int32, device=new.device)
    words = mix(XP, index * k0[:, None] + k1[:, None])
    out.copy_(round_value(new, name, words, saturate=False))


@functools.cache
def _kernel(name: str, device: torch.device, threads: int) -> Callable[..., None]:
    """Return `_round_rows` for a dtype, compiled, for two rows or more."""
    dtype, calls = getattr(torch, name), []
    for rows in (_SCRATCH // _WIDTH, _SCRATCH // _WIDTH - 1):
        matrices = [torch.zeros(rows, _WIDTH, dtype=kind, device=device) for kind in (torch.float32, dtype)]
        for x in matrices:
            mark_width(x)
        calls.append([*matrices, *torch.zeros(3, rows, dtype=torch.int32, device=device)])

    def round_rows(*rows: Tensor) -> None:
        _round_rows(name, *rows)

    return compile_rows(round_rows, compile_options(device), calls, lambda made, places: None)
