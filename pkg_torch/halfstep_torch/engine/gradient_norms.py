"""The norms of many gradients: those of one dtype on one device by one call of a kernel."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.c_driver import FIELDS
from halfstep_torch.distributed.shards import PLAIN
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.kernels.norm_kernel import NormKernel, norm_kernel_of
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.norms import PIECE, norms, norms_of_sums
from halfstep_torch.weights.weight_rule import BoundWeights, NearestWeights

# Of no rule: what comes in leaves in float32, and weights are not read.
_STAGE = Stage((), (), (), BoundWeights(NearestWeights()), (), torch.float32, negates=False, applies=False)
_GRADIENT = len(FIELDS) + 1
_NO_KEYS, _NO_NUMBERS = np.zeros((0, 1), np.uint32), np.zeros((1, 0), np.float32)


class GradientNorms:
    """`norms` of each of many arrays, in rows: with the bits of plain steps, and no copy of any array."""

    def __init__(self, choice: CompileChoice) -> None:
        self._choice, self._tables = choice, {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norms, on the device of the first."""
        made = torch.empty(len(tensors), 2, dtype=torch.float32, device=tensors[0].device)
        kinds: dict[tuple, list[int]] = {}
        for i, x in enumerate(tensors):
            is_flat = type(x) in PLAIN and x.is_contiguous()
            kinds.setdefault((x.device, x.dtype) if is_flat else (), []).append(i)
        for kind, places in kinds.items():
            if kind and (kernel := self._kernel(*kind)) is not None:
                made[places] = self._by_kernel(kernel, kind[0], [tensors[i] for i in places]).to(made.device)
                continue
            for i in places:
                made[i] = norms(tensors[i])
        return made

    def _kernel(self, device: torch.device, dtype: torch.dtype) -> NormKernel | None:
        return self._choice.ready(device, functools.partial(norm_kernel_of, _STAGE, (), dtype, device))

    def _by_kernel(self, kernel: NormKernel, device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norms of arrays of one dtype on one device, in rows."""
        sizes, addresses = [x.numel() for x in tensors], [x.data_ptr() for x in tensors]
        key = kernel, *sizes
        if key not in self._tables:
            self._tables[key] = _Table(sizes, device)
        table = self._tables[key]
        table.rows[:, _GRADIENT] = addresses
        kernel(table.rows, _NO_KEYS, _NO_NUMBERS, None, totals=table.totals)
        return norms_of_sums(table.totals[0]).T


class _Table:
    """The table of a call, which stays from step to step, and the memory of sums."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        pieces = [-(-size // PIECE) for size in sizes]
        self._sums = torch.empty(sum(pieces), dtype=torch.float64, device=device)
        self.totals = torch.empty(1, len(sizes), dtype=torch.float64, device=device)
        starts = (part.data_ptr() for part in self._sums.split(pieces))
        rows = [[size, 0, 0, max(size, 1), 0, 0, 0, start] for size, start in zip(sizes, starts, strict=True)]
        self.rows = np.array(rows, np.int64)
