"""The norms of many gradients: those of one dtype on one device by one call of a kernel."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.engine.kernels.norm_kernel import NormKernel, norm_kernel_of
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.norms import PIECE, norms, norms_of_sums
from halfstep_torch.weights.weight_rule import BoundWeights, NearestWeights

# Of no rule: what comes in leaves in float32, and weights are not read.
_STAGE = Stage((), (), (), BoundWeights(NearestWeights()), (), torch.float32, negates=False, applies=False)
_NO_KEYS, _NO_NUMBERS = np.zeros((0, 1), np.uint32), np.zeros((1, 0), np.float32)


class GradientNorms:
    """`norms` of each of many arrays, in rows: with the bits of plain steps, and no copy of any array."""

    def __init__(self, uses: Callable[[NormKernel, torch.device], bool]) -> None:
        """Make it, given whether steps on a device use a kernel."""
        self._uses = uses

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norms, on the device of the first."""
        made = torch.empty(len(tensors), 2, dtype=torch.float32, device=tensors[0].device)
        kinds: dict[tuple, list[int]] = {}
        for i, x in enumerate(tensors):
            kinds.setdefault((x.device, x.dtype) if x.is_contiguous() else (), []).append(i)
        for kind, places in kinds.items():
            kernel = norm_kernel_of(_STAGE, (), kind[1], kind[0]) if kind else None
            if kernel is not None and self._uses(kernel, kind[0]):
                made[places] = _norms_by(kernel, [tensors[i] for i in places]).to(made.device)
                continue
            for i in places:
                made[i] = norms(tensors[i])
        return made


def _norms_by(kernel: NormKernel, tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of arrays of one dtype on one device, in rows."""
    sizes, addresses = np.array([[x.numel(), x.data_ptr()] for x in tensors], np.int64).T
    ends, device = np.cumsum(-(-sizes // PIECE)), tensors[0].device
    sums = torch.empty(int(ends[-1]), dtype=torch.float64, device=device)
    totals = torch.empty(1, len(tensors), dtype=torch.float64, device=device)
    starts = sums.data_ptr() + 8 * (ends - -(-sizes // PIECE))
    nothing, run = np.zeros_like(sizes), np.maximum(sizes, 1)
    columns = (sizes, nothing, nothing, run, nothing, addresses, addresses, starts)
    kernel(np.ascontiguousarray(np.stack(columns, 1)), _NO_KEYS, _NO_NUMBERS, None, totals)
    return norms_of_sums(totals[0]).T
