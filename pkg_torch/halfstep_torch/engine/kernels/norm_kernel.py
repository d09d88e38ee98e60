"""The kernel that computes the updates of a stage for their norms alone, and those of the weights."""

import functools

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.graph import NoGeneratedForm
from halfstep.kernels.simplify import simplified
from halfstep_torch.engine.kernels.c_kernel import CKernel
from halfstep_torch.engine.kernels.kernel import Kernel, Trial
from halfstep_torch.engine.kernels.trace import measured, trace
from halfstep_torch.engine.scaling import WEIGHTS
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.norms import PIECE, squares_of_pieces, sum_of_pieces


class NormKernel(Kernel):
    """The kernel of norms of a stage on a device. It changes neither weights nor state."""

    def _generated(self) -> CKernel:
        if self._device.type != "cpu":
            raise NoGeneratedForm("norms on this device")
        return CKernel(simplified(measured(trace(self._stage, self._places, self._incoming))))

    def __call__(
        self,
        table: np.ndarray,
        keys: np.ndarray,
        numbers: np.ndarray,
        which: np.ndarray | None,
        totals: Tensor | None = None,
    ) -> None:
        """Add up the squares of the updates and weights of a table.

        Args:
            table: as for a `Kernel`, with the addresses of sums in the place of the update: float64, one for
                each piece of an array (`numbers/norms.py`).
            keys: as for a `Kernel`.
            numbers: likewise.
            which: likewise.
            totals: float64, where the sums go: a row for updates and one for weights, a column for each
                parameter.
        """
        assert isinstance(self._made, CKernel)
        assert totals is not None
        self._made(table, keys, numbers, which, totals)

    def _has_same_bits(self) -> bool:
        stage, trial = self._stage, Trial(self._stage, self._places, self._device)
        g, n = trial.gradient(self._incoming), trial.p.numel()
        words = stage.row_words(lambda: torch.arange(n, dtype=torch.int32, device=g.device), trial.of_leaf)
        u, new = stage.run(trial.p, g, trial.state, trial.by_name, words)
        expected = [u, new[WEIGHTS]] if WEIGHTS in new else [u]
        pieces = torch.empty(len(expected), -(-n // PIECE), dtype=torch.float64, device=self._device)
        totals = torch.empty(len(expected), 1, dtype=torch.float64, device=self._device)
        self(
            trial.table([trial.p, g, *pieces, *trial.state.values()]), trial.keys, trial.numbers, None, totals
        )
        sums = (sum_of_pieces(squares_of_pieces(x)) for x in expected)
        return all(map(torch.equal, totals, (x.view(1) for x in sums)))


@functools.cache
def norm_kernel_of(stage: Stage, places: Values, incoming: torch.dtype, device: torch.device) -> NormKernel:
    """Return the kernel of norms of a stage. If it is new, its compiler is started."""
    return NormKernel(stage, places, incoming, device)
