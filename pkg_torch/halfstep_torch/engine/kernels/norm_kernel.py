"""The kernel that computes the updates of a stage for their norms alone, and those of the weights."""

import functools

import torch

from halfstep.hyperparameters import Values
from halfstep_torch.engine.kernels import kernel
from halfstep_torch.engine.kernels.c_kernel import CKernel
from halfstep_torch.engine.kernels.kernel import Kernel, Trial
from halfstep_torch.engine.kernels.triton_kernel import TritonKernel
from halfstep_torch.engine.scaling import WEIGHTS
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.norms import PIECE, squares_of_pieces, sum_of_pieces


class NormKernel(Kernel):
    """The kernel of norms of a stage on a device. It changes neither weights nor state."""

    def _generated(self) -> CKernel | TritonKernel:
        return kernel.generated(self._stage, self._places, self._incoming, self._device, norms=True)

    def _has_same_bits(self) -> bool:
        stage, trial = self._stage, Trial(self._stage, self._places, self._device)
        g, n = trial.gradient(self._incoming), trial.p.numel()
        words = stage.row_words(lambda: torch.arange(n, dtype=torch.int32, device=g.device), trial.of_leaf)
        u, new = stage.run(trial.p, g, trial.state, trial.by_name, words)
        expected = [u, new[WEIGHTS]] if WEIGHTS in new else [u]
        pieces = torch.empty(len(expected), -(-n // PIECE), dtype=torch.float64, device=self._device)
        totals = torch.empty(len(expected), 1, dtype=torch.float64, device=self._device)
        table = trial.table([trial.p, g, *pieces, *trial.state.values()])
        self(table, trial.keys, trial.numbers, None, totals=totals)
        sums = (sum_of_pieces(squares_of_pieces(x)) for x in expected)
        return all(map(torch.equal, totals, (x.view(1) for x in sums)))


@functools.cache
def norm_kernel_of(stage: Stage, places: Values, incoming: torch.dtype, device: torch.device) -> NormKernel:
    """Return the kernel of norms of a stage. If it is new, its compiler is started."""
    return NormKernel(stage, places, incoming, device)
