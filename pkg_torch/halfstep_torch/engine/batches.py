"""Parameters that are stepped together, by the same kernels and numbers, with their state and their keys."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.distributed.norms import norms_of_shards
from halfstep_torch.distributed.shards import sharding
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.loss_scale import Unscaled
from halfstep_torch.engine.plan import Plan, stream_keys
from halfstep_torch.engine.row_plan import RowPlan, RowSizes, signature
from halfstep_torch.engine.slots import Slot, SlotColumns
from halfstep_torch.engine.step_numbers import StepNumbers
from halfstep_torch.leaves import check_count, check_grad
from halfstep_torch.numbers.random_words import as_int32
from halfstep_torch.optimizer_state.form import LAST_STEP
from halfstep_torch.storage.base_codes import NAN_SCALE
from halfstep_torch.storage.state_array import StateArray

# Counts from which slots that differ in them are stepped together: each of their rows then reads its numbers,
# and the kernel that does so is compiled besides.
_MANY_COUNTS = 5


@dataclasses.dataclass
class Batch:
    """Slots that go through the same stages on one device, with the numbers of their counts.

    Attributes:
        group: of which they are.
        plan: of the slots, but for short blocks.
        device: of all slots.
        grad_dtype: of all gradients.
        slots: the parameters.
        numbers: of each of their counts after this step the numbers of each rule.
        keys: of their random words.
        kernels: of each stage the compiled functions, for rows of one parameter by True, of many by False;
            none where it runs eagerly, and none of any stage where all do.
        row_plan: the rows of the slots.
    """

    group: ReadGroup
    plan: Plan
    device: torch.device
    grad_dtype: torch.dtype
    slots: list[Slot]
    numbers: dict[int, list[StepNumbers]] = dataclasses.field(default_factory=dict)
    keys: Any = None
    kernels: Sequence[Mapping[bool, Callable[..., None]]] = ()
    row_plan: Any = None

    @functools.cached_property
    def streams(self) -> tuple:
        """The random streams that its slots read."""
        return self.plan.streams([link.seed for link in self.group.links])

    def gradients(self, places: Iterable[int]) -> dict[int, Tensor]:
        """Return the gradients of some slots, by their places."""
        if type(self.slots[0]) is not Slot:
            return {place: self.slots[place].grad for place in places}
        grads: Any = [(place, self.slots[place].owner.grad) for place in places]
        return {place: grad.detach() if grad.requires_grad else grad for place, grad in grads}

    def stage_numbers(self, k: int) -> dict[int, list[Any]]:
        """Return of each count the numbers of the rules of the k-th stage, by name."""
        return {step: [n.by_name for n in of_rules] for step, of_rules in self._of_stage(k)}

    def stage_vectors(self, k: int) -> list[list[float]]:
        """Return of each count the numbers of the rules of the k-th stage, one after the other."""
        return [[x for n in of_rules for x in n.flat] for _, of_rules in self._of_stage(k)]

    def _of_stage(self, k: int) -> Iterator[tuple[int, list[StepNumbers]]]:
        rules = self.plan.bounds[k]
        for step, of_rules in self.numbers.items():
            yield step, of_rules[rules.start : rules.stop]


@dataclasses.dataclass
class LastStep:
    """What a step can take over from the one before, which saves time and changes nothing.

    Attributes:
        slots: of each parameter that was stepped what its plan was made from, and its slots.
        plan_keys: of each group, by its index, what the plans of its parameters depend on.
        row_plans: of each batch.
        numbers: of each link of each group, its values and the numbers of each count: where counts differ,
            most are one more than another's.
        launch: the step itself, where it can be run again.
    """

    slots: dict[Tensor, tuple[tuple, Sequence[Slot]]] = dataclasses.field(default_factory=dict)
    plan_keys: dict[int, tuple] = dataclasses.field(default_factory=dict)
    row_plans: dict[tuple, RowPlan] = dataclasses.field(default_factory=dict)
    numbers: dict[tuple[int, int], tuple[Any, dict[int, Any]]] = dataclasses.field(default_factory=dict)
    launch: Any = None

    def forget_state(self) -> None:
        """Let go of state arrays."""
        self.launch = None
        self.slots.clear()
        self.row_plans.clear()


def make_batches(
    parameters: Iterable[tuple[int, str, Tensor]],
    read_group: Callable[[int], ReadGroup],
    states: MutableMapping[Tensor, Any],
    last: LastStep,
    slots_of: Callable[[ReadGroup, str, Tensor], Sequence[Slot]],
) -> list[Batch]:
    """Return the parameters that have a gradient, sorted; all that is read of them is checked.

    `parameters` are triples: the index of the group, leaf name, parameter. New parameters get zeros in
    `states`. `last` is of the step before, and is changed to be of this step. `slots_of` makes the slots of a
    parameter.
    """
    groups: dict[int, ReadGroup] = {}
    plan_keys: dict[int, tuple] = {}
    slots: dict[Tensor, tuple[tuple, Sequence[Slot]]] = {}
    kinds: dict[tuple, dict[int, list[Slot]]] = {}
    for i, name, param in parameters:
        grad = param.grad
        if grad is None:
            continue
        if i not in groups:
            group = groups[i] = read_group(i)
            now, before = group.plan_key, last.plan_keys.get(i, ())
            plan_keys[i] = before if before == now else now  # the same object is compared at once
        group = groups[i]
        check_grad(group.caller, name, param)
        key = (plan_keys[i], param.dtype, param.shape, param.device, name, sharding(param))
        known, of_param = last.slots.get(param, ((), []))
        if known != key:
            of_param = slots_of(group, name, param)
        slots[param], state = (key, of_param), states.get(param)
        counter = of_param[0].counter
        if state and (counter is None or state.get("step") is not counter):
            check_count(group.caller, name, state.get("step"))
        step = min(int(state["step"]) + 1, LAST_STEP) if state else 1
        for slot in of_param:
            slot.begin(step, len(slots))
            kind = (i, id(slot.plan.shared), param.device, grad.dtype, slot.gathered)
            kinds.setdefault(kind, {}).setdefault(step, []).append(slot)
    made = []
    for (i, _, device, grad_dtype, _), by_count in kinds.items():
        parts = list(by_count.values())
        together = [list(itertools.chain(*parts))] if len(parts) >= _MANY_COUNTS else parts
        made += [Batch(groups[i], alike[0].plan, device, grad_dtype, alike) for alike in together]
    last.slots, last.plan_keys = slots, plan_keys
    for batch in made:
        for slot in batch.slots:
            slot.attach(batch.group.caller, states[slot.owner])
    return made


def check_finite(caller: str, batches: Sequence[Batch]) -> None:
    """Raise ValueError for a gradient or a moment that is not finite, where a rule would spread that."""
    for batch in batches:
        links = [batch.group.links[j] for j in batch.plan.rule_indices]
        if not any([link.needs_finite for link in links]):
            continue
        slots = [slot for slot in batch.slots if slot.grad.numel()]
        if not slots:
            continue
        marks = {(slot.name, "gradient"): torch.linalg.vector_norm(slot.grad, math.inf) for slot in slots}
        for slot in slots:
            moments = [moment for rule in slot.plan.rules for moment in rule.moments]
            arrays = {key: spec for moment in moments for key, spec in moment.arrays.items()}
            marks |= {(slot.name, f"state '{key}'"): _mark(arrays[key], slot.kept[key]) for key in arrays}
        # The host waits once for all of a batch.
        finite = torch.stack([x.to(batch.device, torch.float32) for x in marks.values()]).isfinite().tolist()
        for (name, what), is_finite in zip(marks, finite, strict=True):
            if not is_finite:
                cure = "or clip" if what == "gradient" else "or load a state from before it"
                raise ValueError(
                    f"{caller}: the {what} of '{name}' has an infinity or a NaN, and the factor would make "
                    f"NaN of its whole matrix. Leave the step out, {cure}. Nothing was changed."
                )


def _mark(spec: StateArray, x: Tensor) -> Tensor:
    """Return a number that is finite if the codes of a moment, or its scales, are."""
    if spec.scale_of is not None:
        return torch.where((x == NAN_SCALE).any(), math.inf, 0.0)
    if not x.is_floating_point():
        return torch.zeros(())
    return torch.linalg.vector_norm(x if x.itemsize > 1 else x.to(torch.float32), math.inf)


def measure(batches: Sequence[Batch]) -> dict[tuple[int, int], Any]:
    """Return of each link that depends on all gradients what it makes of them, by group and place.

    Processes of a mesh exchange words here: once for each link of a chain, whatever groups it steps.
    """
    measured: dict[tuple[int, int], Any] = {}
    norms: dict[tuple, Callable[[bool], Tensor]] = {}
    for batch in sorted(batches, key=lambda batch: batch.group.index):
        for j in batch.plan.rule_indices:
            link, key = batch.group.links[j], (batch.group.index, j)
            if link.measures and key not in measured:
                of_link = norms.setdefault(
                    (id(link), batch.group.scale), _norms_of(batches, link, batch.group.scale)
                )
                measured[key] = link.measure(batch.group.values[j], of_link)
    return measured


def _norms_of(batches: Iterable[Batch], link: Any, scale: float | None) -> Callable[[bool], Tensor]:
    """Return what computes, once, the `norms` of the gradients that a link is to see."""

    @functools.cache
    def norms(exact: bool) -> Tensor:
        slots = [slot for other in batches if _has(other, link) for slot in other.slots]
        slots.sort(key=lambda slot: slot.index)
        grads = [slot.grad for slot in slots]
        held = [slot.held for slot in slots]
        return norms_of_shards(grads if scale is None else Unscaled(grads, scale), held, exact=exact)

    return norms


def attach_numbers(batches: Sequence[Batch], measured: Mapping[tuple[int, int], Any], last: LastStep) -> None:
    """Give batches the numbers of each rule, those that depend on all gradients too."""
    known, last.numbers = last.numbers, {}
    for batch in batches:
        batch.numbers = _step_numbers(batch, measured, known, last.numbers)


def _step_numbers(
    batch: Batch, all_measured: Mapping, known: Mapping, now: dict
) -> dict[int, list[StepNumbers]]:
    """Return of each count of a batch the numbers of each rule; what is `known` is not computed again."""
    group, numbers = batch.group, {slot.step: [] for slot in batch.slots}
    for j in batch.plan.rule_indices:
        link, h, measured = group.links[j], group.values[j], all_measured.get((group.index, j))
        before, of_counts = known.get((group.index, j), (None, {}))
        of_counts = of_counts if before == h and not link.measures else {}
        _, kept = now.setdefault((group.index, j), (h, {}))
        for step, of_rules in numbers.items():
            if step not in kept or link.measures:
                kept[step] = of_counts.get(step) or StepNumbers.of(link.step_numbers(h, step, measured))
            of_rules.append(kept[step])
    return numbers


def _has(batch: Batch, link: Any) -> bool:
    return any(batch.group.links[j] is link for j in batch.plan.rule_indices)


def attach_keys(batches: Iterable[Batch]) -> None:
    """Give batches the keys of their random words, those of equal streams derived at once."""
    by_streams: dict[tuple, list[Batch]] = {}
    for batch in batches:
        by_streams.setdefault(batch.streams, []).append(batch)
    for streams, sharing in by_streams.items():
        slots = [slot for batch in sharing for slot in batch.slots]
        keys = stream_keys(streams, [slot.step for slot in slots], [slot.name for slot in slots])
        start = 0
        for batch in sharing:
            stop = start + len(batch.slots)
            columns = np.ascontiguousarray(as_int32(keys[start:stop]).T)
            batch.keys, start = SlotColumns(torch.from_numpy(columns).to(batch.device)), stop


def attach_row_plans(batches: Iterable[Batch], last: LastStep, sizes: RowSizes | None = None) -> None:
    """Give batches their rows: those of the step before where all is where it was.

    `last` is of the step before, and is changed to be of this step. `sizes` are by default the fastest.
    """
    before, counts = dict(last.row_plans), collections.Counter()
    last.row_plans.clear()
    for batch in batches:
        # Batches that differ in their counts alone come in the order of the parameters.
        compiled = bool(batch.kernels)
        kind = (batch.group.index, id(batch.plan.shared), batch.device, batch.grad_dtype, compiled)
        key, counts[kind] = (*kind, counts[kind]), counts[kind] + 1
        plan = before.get(key)
        if plan is None or plan.signature != signature(batch.slots):
            plan = RowPlan(batch.slots, batch.grad_dtype, compiled, sizes)
        batch.row_plan = plan
        if not batch.slots[0].gathered:  # whose memory goes after the step
            last.row_plans[key] = plan
