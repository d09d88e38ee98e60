"""float32 copies of 16-bit weights and gradients, from which the weights are rounded.

Copies are in adjacent rows, and each row has elements of one parameter. So plain torch rounds all of them
together, and so does one call of a kernel.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.random_words import GOLDEN_RATIO, Role
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.in_place import rounding, run_kernel
from halfstep_torch.engine.plain import piece_length
from halfstep_torch.numbers.exact import looking_at_numbers
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import as_int32, mixed_words
from halfstep_torch.numbers.rounding import round_value

_WIDTH = 256


class Float32Copies:
    """Memory for float32 copies of weights and gradients on one device, for one 16-bit dtype.

    Args:
        params: the parameters.
        memory: the arrays for copies on a CPU from earlier calls, by device. They grow to the most elements
            so far, because new memory costs a CPU more than a step of the weights.

    Attributes:
        weights: a float32 tensor for each parameter, in its shape.
        grads: a float32 tensor for each gradient, in its shape.
    """

    def __init__(self, params: Sequence[Tensor], memory: dict[torch.device, list[Tensor]]) -> None:
        self._params = list(params)
        self._windows = [Window.full(tuple(param.shape)) for param in params]
        device = params[0].device
        lengths = [-(-param.numel() // _WIDTH) for param in params]
        count, kept = sum(lengths), memory.get(device)
        if kept is None or len(kept[0]) < count:
            kept = [torch.empty(count, _WIDTH, dtype=torch.float32, device=device) for _ in range(2)]
            if device.type == "cpu":
                memory[device] = kept
        new, grads = (x[:count] for x in kept)
        # Gradients are not read when weights are rounded, so rounded weights use their memory.
        rounded = grads.view(params[0].dtype).view(-1, _WIDTH)[:count]
        self._rows, self._places = (new, rounded), row_places(lengths)
        self.weights, self.grads, self._rounded = map(self._parts, (new, grads, rounded))

    def _parts(self, rows: Tensor) -> list[Tensor]:
        """Return a view of each parameter's rows, in its shape."""
        sizes = [(param.numel(), -param.numel() % _WIDTH) for param in self._params]
        flat = rows.reshape(-1).split_with_sizes([*itertools.chain(*sizes)])[::2]
        return [x.view(param.shape) for x, param in zip(flat, self._params, strict=True)]

    def fill(self) -> None:
        """Copy weights and gradients."""
        for weight, grad, param in zip(self.weights, self.grads, self._params, strict=True):
            weight.copy_(param)
            assert param.grad is not None
            grad.copy_(param.grad)

    def round(self, caller: str, keys: np.ndarray, choice: CompileChoice) -> None:
        """Round every weight from its copy, by R5, with the words of its row-major indices.

        Args:
            caller: the name in messages.
            keys: int32 keys of the words, a row of k0 and a row of k1, a column each (contract W4).
            choice: the choice between a kernel and plain torch.
        """
        device = self._params[0].device
        stage = rounding(_copied, Role.PARAM, self._params[0].dtype)
        kernel = stage.kernel(caller, choice, (), torch.float32, device)
        if kernel is None or not all(kernel.takes(stage, window) for window in self._windows):
            self._round_rows(keys)
            for param, rounded in zip(self._params, self._rounded, strict=True):
                param.copy_(rounded)
            return
        strided = [i for i, param in enumerate(self._params) if not param.is_contiguous()]
        rounded = [param.detach() for param in self._params]
        for i in strided:
            rounded[i] = self._rounded[i]
        pairs = list(zip(rounded, self.weights, strict=True))
        run_kernel(kernel, stage, pairs, keys.view(np.uint32), (), self._windows)
        for i in strided:
            self._params[i].copy_(self._rounded[i])

    @looking_at_numbers()
    def _round_rows(self, keys: np.ndarray) -> None:
        dtype, device = dtype_name(self._params[0].dtype), self._params[0].device
        rows = *self._rows, *(torch.from_numpy(x).to(device) for x in row_words(keys, *self._places))
        count, piece = len(rows[0]), piece_length(device) // _WIDTH
        for start in range(0, count, piece):
            _round_rows(dtype, *(x[start : start + piece] for x in rows))


def _copied(_: Tensor, new: Tensor) -> Tensor:
    """Return the copy, which replaces the weight."""
    return new


def row_places(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's parameter and the index of its first element, given rows per parameter."""
    parameter = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum([0, *lengths[:-1]])[parameter]
    return parameter, (np.arange(len(parameter), dtype=np.int64) - before) * _WIDTH


def row_words(keys: np.ndarray, parameter: np.ndarray, first: np.ndarray) -> list[np.ndarray]:
    """Return the low half of each row's first index, and its two keys (contract W8)."""
    k0, k1 = (row[parameter] for row in keys)
    return [
        as_int32(x) for x in (first, k0, k1.view(np.uint32) + GOLDEN_RATIO * (first >> 32).astype(np.uint32))
    ]


def _round_rows(dtype: str, new: Tensor, rounded: Tensor, first: Tensor, k0: Tensor, k1: Tensor) -> None:
    sums = torch.arange(_WIDTH, dtype=torch.int32, device=new.device) * k0[:, None]
    sums += (first * k0 + k1)[:, None]
    rounded.copy_(round_value(new, dtype, mixed_words(sums), saturate=False))
