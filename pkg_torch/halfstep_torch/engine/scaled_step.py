"""Steps of a batch with a rule that scales by norms, with kernels that keep no update (`scaling.py`).

squares                the sums of squares of updates and weights
or largest, integers   of exact norms: first the largest magnitude, and then the sums in units of it
apply                  changes weights and state
"""

import functools
from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.c_driver import FIELDS
from halfstep.kernels.graph import NoGeneratedForm
from halfstep_torch.distributed.norms import Share
from halfstep_torch.distributed.shards import counts_here, is_sharded
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.kernels.kernel import Kernel, kernel_of
from halfstep_torch.engine.kernels.norm_kernel import NormKernel, norm_kernel_of
from halfstep_torch.engine.kernels.scale_kernel import ScaleKernel, scale_kernel_of
from halfstep_torch.engine.kernels.tables import row_of
from halfstep_torch.engine.number_places import flat, number_places
from halfstep_torch.engine.scaling import Asked, NotScaling, Scale, asked_norms, scale_of
from halfstep_torch.engine.slots import Slot
from halfstep_torch.numbers.global_norm import roots_of
from halfstep_torch.numbers.norms import PIECE, norms_of_sums

Walk = Generator[Sequence, None, None]
"""Generator that steps slots in place and yields requests to other processes."""
_GRADIENT = len(FIELDS) + 1


def numbers_of_two(rules: Sequence[Values], place: int) -> tuple[tuple, tuple]:
    """Return the numbers of both stages, given the numbers of the plan's rules. `SCALED` has none yet.

    The numbers of the scaling rule are in the first stage, for the kernel that follows it on a device.
    """
    before, after = rules[:place], rules[place + 1 :]
    return (*before, rules[place]), (*before, Scale(1.0, 1.0), *after)


class ScaledStep:
    """The kernels of a batch, and their tables.

    Attributes:
        kernels: the kernels that measure, and the kernel that changes weights and state.
    """

    def __init__(self, batch: Batch) -> None:
        """Find the kernels, or start their compilers.

        Raises:
            NotScaling: if there are none.
        """
        if batch.plan.scaling is None:
            raise NotScaling
        (self._place, measure, apply), rules = batch.plan.scaling, next(iter(batch.numbers.values()))
        self._first = len(flat(rules[: self._place]))
        self._asked = asked_norms(batch.plan.rules[self._place], rules[self._place])
        of_measure, of_apply = numbers_of_two(rules, self._place)
        exact = {asked.exact for asked in self._asked}
        kinds = [
            *(["squares"] if False in exact else []),
            *(["largest", "integers"] if True in exact else []),
        ]
        of_measure = measure.padded, number_places(of_measure), batch.grad_dtype, batch.device
        self._measures = {sums: norm_kernel_of(*of_measure, sums) for sums in kinds}
        self._apply = kernel_of(apply.padded, number_places(of_apply), batch.grad_dtype, batch.device)
        self.kernels: Sequence[Kernel] = [*self._measures.values(), self._apply]
        if any(kernel.missing for kernel in self.kernels):
            raise NotScaling
        self._scale_kernel = self._on_device(batch, rules)

    def _on_device(self, batch: Batch, rules: Sequence[Values]) -> ScaleKernel | None:
        """Return the kernel of the numbers of `SCALED`, if they can stay on a device."""
        squares = self._measures.get("squares")
        if squares is None or squares.on_device is None or len(self._measures) > 1:
            return None
        rule, numbers = batch.plan.rules[self._place], rules[self._place]
        try:
            return scale_kernel_of(rule, number_places(numbers), squares.count, batch.device)
        except NoGeneratedForm:
            return None

    def walk(self, batch: Batch, tables: "Tables", arriving: Mapping[int, Tensor]) -> Walk:
        """Step the slots of tables. Yield requests to other processes if slots wait for them."""
        places = tables.places
        for table in (tables.measure, tables.apply):
            table[:, _GRADIENT] = [arriving[place].data_ptr() for place in places]
        steps = [batch.steps[place] for place in places]
        at = {step: i for i, step in enumerate(batch.numbers)}
        which = np.array([at[step] for step in steps], np.int32)
        keys = np.ascontiguousarray(batch.host_keys[:, places])
        of_counts = [numbers_of_two(rules, self._place) for rules in batch.numbers.values()]
        of_measure, of_apply = (
            np.array([[*map(float, flat(x))] for x in of_stage], np.float32)
            for of_stage in zip(*of_counts, strict=True)
        )
        inputs = keys, of_measure, which
        scale = self._scale_on_device(batch, tables, inputs)
        kernel = self._scale_kernel
        if scale is None or kernel is None or not kernel.is_checked:
            norms: dict[Asked, Tensor] = {}
            yield from self._measure(batch, tables, inputs, norms)
            expected = self._scale(batch, steps, norms)
            if scale is not None and kernel is not None:
                kernel.check(scale, expected)
            scale = expected
        self._apply(tables.apply, keys, of_apply, which, late=(self._first, scale))

    def _scale_on_device(self, batch: Batch, tables: "Tables", inputs: tuple) -> Tensor | None:
        """Return the numbers of `SCALED`, a row for each parameter, by two launches."""
        if self._scale_kernel is None or self._scale_kernel.problem:
            return None
        if any(batch.slots[place].waits for place in tables.places):
            return None
        made = torch.empty(len(tables.places), 2, dtype=torch.float32, device=batch.device)
        first = len(inputs[0]) + self._first
        then = functools.partial(self._scale_kernel, first=first, made=made)
        squares = self._measures["squares"].on_device
        assert squares is not None
        squares(tables.measure, *inputs, then=then)
        return made

    def _measure(self, batch: Batch, tables: "Tables", inputs: tuple, norms: dict[Asked, Tensor]) -> Walk:
        """Put the norms of each parameter into `norms`, in columns."""
        exact, largest = [asked for asked in self._asked if asked.exact], {}
        plain = [asked for asked in self._asked if not asked.exact]
        shares = _Shares([batch.slots[place] for place in tables.places], self._asked)
        if plain:
            totals = self._measures["squares"].totals(tables.measure, *inputs)
            norms |= {asked: norms_of_sums(totals[_row(asked)]) for asked in plain}
        if exact:
            totals = self._measures["largest"].totals(tables.measure, *inputs)
            largest = {asked: totals[_row(asked)].to(torch.int32) for asked in exact}
        if shares.there:
            yield shares.of({"norm": norms, "largest": largest})
            shares.take()
        if exact:
            rows = [largest.get(Asked(bool(of_update), True)) for of_update in (1, 0)]
            zero = torch.zeros_like(next(iter(largest.values())))
            units = [zero if x is None else x >> 23 for x in rows][: self._measures["integers"].count]
            totals = self._measures["integers"].totals(tables.measure, *inputs, units=torch.stack(units))
            sums = {asked: totals[2 * _row(asked) :][:2] for asked in exact}
            if shares.there:
                yield shares.of({"sum": sums})
                shares.take()
            norms |= {asked: roots_of(sums[asked], largest[asked]) for asked in exact}

    def _scale(self, batch: Batch, steps: Sequence[int], norms: Mapping[Asked, Tensor]) -> Tensor:
        """Return the numbers of `SCALED`, a row for each parameter."""
        rule = batch.plan.rules[self._place]
        scale = torch.empty(len(steps), 2, dtype=torch.float32, device=batch.device)
        for step, rules in batch.numbers.items():
            of_step = [i for i, other in enumerate(steps) if other == step]
            if of_step:
                made = scale_of(
                    rule, rules[self._place], lambda of, at=of_step: norms[of][:, at], batch.device
                )
                scale[of_step] = torch.stack(made, 1)
        return scale

    def tables(self, batch: Batch, arriving: Mapping[int, Tensor]) -> "Tables":
        """Return the tables of a batch, with the slots that kernels can update."""
        if self._made is None or batch.slots[0].gathered:  # its memory changes in each step
            self._made = Tables(batch, [*self._measures.values()], self._apply, arriving)
        return self._made

    _made: "Tables | None" = None


def _row(asked: Asked) -> int:
    return 0 if asked.of_update else 1


class _Shares:
    """This process's shares in the norms of sharded parameters, and the totals over processes.

    Attributes:
        there: whether there are any shares.
    """

    def __init__(self, slots: Sequence[Slot], asked: Sequence[Asked]) -> None:
        self._slots, self._asked = [(i, slot) for i, slot in enumerate(slots) if slot.waits], asked
        self._waiting: list[tuple[Share, Tensor]] = []
        self.there = bool(self._slots)

    def of(self, kinds: Mapping[str, Mapping[Asked, Tensor]]) -> list[Share]:
        """Return the shares in arrays with a number for each parameter along the last axis."""
        self._waiting = []
        for kind, arrays in kinds.items():
            for j, asked in enumerate(self._asked):
                for i, slot in self._slots if asked in arrays else ():
                    assert is_sharded(slot.owner)
                    here = arrays[asked][..., i]
                    value = here.clone() if counts_here(slot.owner) else torch.zeros_like(here)
                    share = Share(kind, (slot.index, j), slot.owner.device_mesh, value)
                    self._waiting.append((share, here))
        return [share for share, _ in self._waiting]

    def take(self) -> None:
        """Write the totals over processes into the arrays."""
        for share, here in self._waiting:
            here.copy_(share.value)


class Tables:
    """The tables of kernels, and the memory of sums.

    Attributes:
        places: the places of the slots that kernels can update. `rest` has the other places.
        measure, apply: the tables of these kernels.
    """

    def __init__(
        self, batch: Batch, measures: Sequence[NormKernel], apply: Kernel, arriving: Mapping[int, Tensor]
    ) -> None:
        self.places, self.rest = [], []
        for place, g in arriving.items():
            taken = _is_taken(batch.slots[place], g, measures, apply)
            (self.places if taken else self.rest).append(place)
        slots = [batch.slots[place] for place in self.places]
        pieces = [-(-slot.param.numel() // PIECE) for slot in slots]
        self._sums = torch.empty(2, sum(pieces), dtype=torch.float64, device=batch.device)
        sums = zip(*(row.split(pieces) for row in self._sums), strict=True)
        grads = [arriving[place] for place in self.places]
        self.measure = np.array([*map(_measure_row, slots, grads, sums)], np.int64)
        self.apply = np.array([*map(_apply_row, slots, grads)], np.int64)


def _is_taken(slot: Slot, g: Tensor, measures: Sequence[NormKernel], apply: Kernel) -> bool:
    stages = slot.plan.scaling
    assert stages is not None
    takes = all(kernel.takes(stages.measure, slot.window) for kernel in measures)
    return slot.is_flat(g) and takes and apply.takes(stages.apply, slot.window)


def _measure_row(slot: Slot, g: Tensor, sums: Sequence[Tensor]) -> list[int]:
    stage = slot.plan.scaling.measure  # pyright: ignore[reportOptionalMemberAccess]
    return row_of(stage, slot.window, [slot.param, g, *sums, *(slot.state[x] for x in stage.arrays)])


def _apply_row(slot: Slot, g: Tensor) -> list[int]:
    stage = slot.plan.scaling.apply  # pyright: ignore[reportOptionalMemberAccess]
    return row_of(stage, slot.window, [slot.param, g, *(slot.state[x] for x in stage.arrays)])
