"""The kernel that computes a stage's updates only for the norms of updates and weights."""

import functools

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.graph import SUMS
from halfstep_torch.engine.kernels import kernel
from halfstep_torch.engine.kernels.c_kernel import CKernel
from halfstep_torch.engine.kernels.kernel import Kernel, Trial
from halfstep_torch.engine.kernels.triton_kernel import TritonKernel
from halfstep_torch.engine.scaling import NORMS, WEIGHTS
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.global_norm import largest_pattern, roots_of, sum_of_squares
from halfstep_torch.numbers.norms import PIECE, squares_of_pieces, sum_of_pieces


class NormKernel(Kernel):
    """The kernel of norms of a stage on a device. It changes neither weights nor state.

    Attributes:
        count: the number of norms for each parameter, of the update and, if asked for, of the weights.
    """

    def __init__(
        self, stage: Stage, places: Values, incoming: torch.dtype, device: torch.device, sums: str
    ) -> None:
        """Make the kernel for a kind of sums (`SUMS`)."""
        self._sums, self.count = sums, 2 if NORMS in stage.rules else 1
        super().__init__(stage, places, incoming, device)

    def _generated(self) -> CKernel | TritonKernel:
        return kernel.generated(self._stage, self._places, self._incoming, self._device, self._sums)

    def totals(
        self,
        table: np.ndarray,
        keys: np.ndarray,
        numbers: np.ndarray,
        which: np.ndarray | None,
        units: Tensor | None = None,
    ) -> Tensor:
        """Return the sums, a column for each parameter, with a row for each norm or for each word of it.

        Arguments are as in a call. `units` are exponent fields, a row for each norm.
        """
        kind, late = SUMS[self._sums], None
        if units is not None:
            late = numbers.shape[1], units.T.to(torch.float32)
            numbers = np.pad(numbers, ((0, 0), (0, len(units))))
        shape = kind.words * self.count, len(table)
        made = torch.empty(shape, dtype=getattr(torch, kind.dtype), device=self._device)
        self(table, keys, numbers, which, late=late, totals=made)
        return made

    def _has_same_bits(self) -> bool:
        stage, trial = self._stage, Trial(self._stage, self._places, self._device)
        g, n = trial.gradient(self._incoming), trial.p.numel()
        words = stage.row_words(lambda: torch.arange(n, dtype=torch.int32, device=g.device), trial.of_leaf)
        u, new = stage.run(trial.p, g, trial.state, trial.by_name, words)
        arrays = [u, new[WEIGHTS]] if WEIGHTS in new else [u]
        pieces = torch.empty(len(arrays), -(-n // PIECE), dtype=torch.float64, device=self._device)
        table = trial.table([trial.p, g, *pieces, *trial.state.values()])
        largest = torch.stack([largest_pattern([x], self._device) for x in arrays])
        units = largest[:, None] >> 23 if SUMS[self._sums].has_units else None
        made = self.totals(table, trial.keys, trial.numbers, None, units)[:, 0]
        if self._sums == "integers":  # equal sums may differ in their low and high words
            exact = [sum_of_squares([x], unit) for x, unit in zip(arrays, largest, strict=True)]
            made, expected = (roots_of(x.view(-1, 2).T, largest) for x in (made, torch.cat(exact)))
        elif self._sums == "largest":
            expected = largest.to(torch.int64)
        else:
            expected = torch.stack([sum_of_pieces(squares_of_pieces(x)) for x in arrays])
        return torch.equal(made, expected)


@functools.cache
def norm_kernel_of(
    stage: Stage, places: Values, incoming: torch.dtype, device: torch.device, sums: str = "squares"
) -> NormKernel:
    """Return the kernel of norms of a stage. If it is new, its compiler is started."""
    return NormKernel(stage, places, incoming, device, sums)
