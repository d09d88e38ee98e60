"""Stepping a batch in which a rule scales by norms, with two kernels that keep no update (`scaling.py`)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.c_driver import FIELDS
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.kernels.kernel import Kernel, kernel_of
from halfstep_torch.engine.kernels.norm_kernel import NormKernel, norm_kernel_of
from halfstep_torch.engine.kernels.tables import row_of
from halfstep_torch.engine.number_places import flat, number_places
from halfstep_torch.engine.scaling import NotScaling, Scale, scale_of
from halfstep_torch.engine.slots import Slot
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.numbers.norms import PIECE

_GRADIENT = len(FIELDS) + 1


def numbers_of_two(rules: Sequence[Values], place: int) -> tuple[tuple, tuple]:
    """Return the numbers of both stages, given those of the plan's rules; `SCALED` has none yet."""
    before, after = rules[:place], rules[place + 1 :]
    return (*before, ()), (*before, Scale(1.0, 1.0), *after)


def scales(rule: BoundRule, numbers: Values) -> bool:
    """Whether a rule does nothing else than to multiply an update by a number that norms give."""
    one = torch.ones(1, dtype=torch.float64)
    try:
        scale_of(rule, numbers, one, one)
    except NotScaling:
        return False
    return True


class ScaledStep:
    """The two kernels of a batch, and their tables.

    Attributes:
        kernels: the one that measures, and the one that changes weights and state.
    """

    def __init__(self, batch: Batch) -> None:
        """Find the kernels, or start their compilers.

        Raises:
            NotScaling: if there are none: the rule does something else, or waits for other processes.
        """
        stages = batch.plan.scaling
        if stages is None or any(slot.waits for slot in batch.slots):
            raise NotScaling
        (self._place, measure, apply), rules = stages, next(iter(batch.numbers.values()))
        if not scales(batch.plan.rules[self._place], rules[self._place]):
            raise NotScaling
        of_measure, of_apply = numbers_of_two(rules, self._place)
        self.kernels: tuple[NormKernel, Kernel] = (
            norm_kernel_of(measure.padded, number_places(of_measure), batch.grad_dtype, batch.device),
            kernel_of(apply.padded, number_places(of_apply), batch.grad_dtype, batch.device),
        )
        if any(kernel.missing for kernel in self.kernels):
            raise NotScaling

    def run(self, batch: Batch, arriving: Mapping[int, Tensor]) -> list[int]:
        """Step the slots that kernels can update; return the places of the others."""
        tables = self._tables(batch, arriving)
        if not tables.places:
            return tables.rest
        measure, apply = self.kernels
        for table in (tables.measure, tables.apply):
            table[:, _GRADIENT] = [arriving[place].data_ptr() for place in tables.places]
        steps = [batch.steps[place] for place in tables.places]
        at = {step: i for i, step in enumerate(batch.numbers)}
        which = np.array([at[step] for step in steps], np.int32)
        keys = np.ascontiguousarray(batch.host_keys[:, tables.places])
        of_counts = [numbers_of_two(rules, self._place) for rules in batch.numbers.values()]
        of_measure, of_apply = (
            np.array([[*map(float, flat(x))] for x in of_stage], np.float32)
            for of_stage in zip(*of_counts, strict=True)
        )
        measure(tables.measure, keys, of_measure, which, totals=tables.totals)
        late = of_measure.shape[1], self._scale(batch, steps, tables.totals)
        apply(tables.apply, keys, of_apply, which, late=late)
        return tables.rest

    def _scale(self, batch: Batch, steps: Sequence[int], totals: Tensor) -> Tensor:
        """Return the numbers of `SCALED` in two rows, a column for each parameter."""
        rule, scale = batch.plan.rules[self._place], torch.empty_like(totals, dtype=torch.float32)
        for step, rules in batch.numbers.items():
            of_step = [i for i, other in enumerate(steps) if other == step]
            scale[:, of_step] = torch.stack(scale_of(rule, rules[self._place], *totals[:, of_step]))
        return scale

    def _tables(self, batch: Batch, arriving: Mapping[int, Tensor]) -> "_Tables":
        if self._made is None:
            self._made = _Tables(batch, self.kernels, arriving)
        return self._made

    _made: "_Tables | None" = None


class _Tables:
    """The tables of both kernels, and the memory of sums.

    Attributes:
        places: of the slots that kernels can update; `rest` of the others.
        measure, apply: tables.
        totals: float64, the sums of squares of updates, and those of weights, in rows.
    """

    def __init__(self, batch: Batch, kernels: Sequence[Kernel], arriving: Mapping[int, Tensor]) -> None:
        self.places, self.rest = [], []
        for place, g in arriving.items():
            (self.places if _is_taken(batch.slots[place], g, kernels) else self.rest).append(place)
        slots = [batch.slots[place] for place in self.places]
        pieces = [-(-slot.param.numel() // PIECE) for slot in slots]
        self._sums = torch.empty(2, sum(pieces), dtype=torch.float64, device=batch.device)
        sums = zip(*(row.split(pieces) for row in self._sums), strict=True)
        self.totals = torch.empty(2, len(slots), dtype=torch.float64, device=batch.device)
        grads = [arriving[place] for place in self.places]
        self.measure = np.array([*map(_measure_row, slots, grads, sums)], np.int64)
        self.apply = np.array([*map(_apply_row, slots, grads)], np.int64)


def _is_taken(slot: Slot, g: Tensor, kernels: Sequence[Kernel]) -> bool:
    stages = slot.plan.scaling
    assert stages is not None
    pairs = zip(kernels, (stages.measure, stages.apply), strict=True)
    return slot.is_flat(g) and all(kernel.takes(stage, slot.window) for kernel, stage in pairs)


def _measure_row(slot: Slot, g: Tensor, sums: Sequence[Tensor]) -> list[int]:
    stage = slot.plan.scaling.measure  # pyright: ignore[reportOptionalMemberAccess]
    return row_of(stage, slot.window, [slot.param, g, *sums, *(slot.state[x] for x in stage.arrays)])


def _apply_row(slot: Slot, g: Tensor) -> list[int]:
    stage = slot.plan.scaling.apply  # pyright: ignore[reportOptionalMemberAccess]
    return row_of(stage, slot.window, [slot.param, g, *(slot.state[x] for x in stage.arrays)])
