"""The norms of many gradients, by one kernel call for each dtype and device, or two calls if exact."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.c_driver import FIELDS
from halfstep.kernels.graph import NoGeneratedForm
from halfstep_torch.distributed.shards import PLAIN
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.kernels.norm_kernel import NormKernel, norm_kernel_of
from halfstep_torch.engine.kernels.scale_kernel import measure_kernel_of
from halfstep_torch.engine.stage import Stage
from halfstep_torch.links.link import LateNumbers, Link
from halfstep_torch.numbers.global_norm import Sums, global_norms, largest_pattern, sum_of_squares
from halfstep_torch.numbers.norms import PIECE, norms, norms_of_sums
from halfstep_torch.weights.weight_rule import BoundWeights, NearestWeights

# Without a rule the gradient leaves in float32, and no weight is read.
_STAGE = Stage((), (), (), BoundWeights(NearestWeights()), (), torch.float32, negates=False, applies=False)
_GRADIENT = len(FIELDS) + 1
Kind = tuple[Any, ...]
"""Device, dtype and form of the gradients for one kernel."""
_NO_KEYS, _NO_NUMBERS = np.zeros((0, 1), np.uint32), np.zeros((1, 0), np.float32)


class GradientNorms:
    """Sums over many arrays, with the bits of plain steps, and no copy of any array.

    Attributes:
        sums: the functions.
    """

    def __init__(self, choice: CompileChoice) -> None:
        self._choice, self._tables = choice, {}
        self.sums = Sums(self._norms, self._largest, self._squares)

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the `norms` of each array, in rows, on the device of the first."""
        made = torch.empty(len(tensors), 2, dtype=torch.float32, device=tensors[0].device)
        for places, totals in self._by_kernels("squares", tensors):
            if totals is not None:
                made[places] = norms_of_sums(totals[0]).T.to(made.device)
                continue
            for i in places:
                made[i] = norms(tensors[i])
        return made

    def _largest(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the bits of the largest magnitude, int32."""
        parts = [
            largest_pattern([tensors[i] for i in places], device)
            if totals is None
            else totals.amax().to(device)
            for places, totals in self._by_kernels("largest", tensors)
        ]
        return torch.stack([torch.zeros((), dtype=torch.int64, device=device), *parts]).amax().to(torch.int32)

    def _squares(self, tensors: Sequence[Tensor], largest: Tensor) -> Tensor:
        """Return the sum of all squares, as `sum_of_squares` does."""
        parts = [
            sum_of_squares([tensors[i] for i in places], largest) if totals is None else totals.sum(1)
            for places, totals in self._by_kernels("integers", tensors, largest >> 23)
        ]
        zero = torch.zeros(2, dtype=torch.int64, device=largest.device)
        return torch.stack([zero, *(x.to(zero.device) for x in parts)]).sum(0)

    def late(self, link: Link, h: Values, tensors: Sequence[Tensor]) -> Mapping[str, Tensor] | None:
        """Return the numbers that a link measures over all arrays, left on the device by two launches.

        It returns None if there are no such kernels, as on a CPU, or the arrays differ in kind.
        """
        kinds = {_kind_of(x) for x in tensors}
        kind: Kind = kinds.pop() if len(kinds) == 1 else ()
        kernel = self._kernel(kind, "squares") if kind else None
        if kernel is None or (device := kernel.on_device) is None:
            return None
        try:
            last = measure_kernel_of(link, h, kind[0])
        except NoGeneratedForm:
            return None
        if last.problem:
            return None
        made = torch.empty(len(tensors), len(last.names), dtype=torch.float32, device=kind[0])
        table = self._table(kernel, kind[0], tensors)
        device(table, _NO_KEYS, _NO_NUMBERS, None, then=functools.partial(last, made=made))
        if not last.is_checked:
            plain = link.measure(h, functools.partial(self._of_all, tensors))
            last.check(made, torch.stack([*plain.values()]).expand(made.shape))
            return None if last.problem else LateNumbers(last.names, made)
        return LateNumbers(last.names, made)

    def _of_all(self, tensors: Sequence[Tensor], exact: bool) -> Tensor:
        return global_norms(tensors, exact=exact, sums=self.sums)

    def _by_kernels(
        self, sums: str, tensors: Sequence[Tensor], unit: Tensor | None = None
    ) -> Iterator[tuple[list[int], Tensor | None]]:
        """Yield the places of arrays with their sums in columns, or with None if there is no kernel."""
        kinds: dict[Kind, list[int]] = {}
        for i, x in enumerate(tensors):
            kinds.setdefault(_kind_of(x), []).append(i)
        for kind, places in kinds.items():
            kernel = self._kernel(kind, sums) if kind else None
            if kernel is None:
                yield places, None
                continue
            table = self._table(kernel, kind[0], [tensors[i] for i in places])
            units = None if unit is None else unit.to(kind[0]).expand(1, len(places))
            yield places, kernel.totals(table, _NO_KEYS, _NO_NUMBERS, None, units)

    def _kernel(self, kind: Kind, sums: str) -> NormKernel | None:
        device, dtype = kind
        return self._choice.ready(device, functools.partial(norm_kernel_of, _STAGE, (), dtype, device, sums))

    def _table(self, kernel: NormKernel, device: torch.device, tensors: Sequence[Tensor]) -> np.ndarray:
        """Return the table of a call, kept between steps with the memory of sums."""
        sizes = [x.numel() for x in tensors]
        key = kernel, *sizes
        if key not in self._tables:
            self._tables[key] = _Table(sizes, device)
        rows = self._tables[key].rows
        rows[:, _GRADIENT] = [x.data_ptr() for x in tensors]
        return rows


def _kind_of(x: Tensor) -> Kind:
    """Return device and dtype of an array, or () if kernels cannot read it."""
    return (x.device, x.dtype) if type(x) in PLAIN and x.is_contiguous() else ()


class _Table:
    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        pieces = [-(-size // PIECE) for size in sizes]
        self._sums = torch.empty(sum(pieces), dtype=torch.float64, device=device)
        starts = (part.data_ptr() for part in self._sums.split(pieces))
        rows = [[size, 0, 0, max(size, 1), 0, 0, 0, start] for size, start in zip(sizes, starts, strict=True)]
        self.rows = np.array(rows, np.int64)
