"""Batches: parameters that the same kernels step together, with their state and keys."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep.hyperparameters import Values
from halfstep.kernels.c_driver import FIELDS
from halfstep_torch.distributed.norms import norms_of_shards
from halfstep_torch.distributed.shards import is_sharded, local_part
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.kernels.kernel import Kernel
from halfstep_torch.engine.kernels.tables import row_of
from halfstep_torch.engine.loss_scale import Unscaled
from halfstep_torch.engine.number_places import flat
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot, count_on_device
from halfstep_torch.leaves.checks import check_count, check_grad, check_weight
from halfstep_torch.leaves.memory import check_memory, has_memory, is_other_view
from halfstep_torch.links.link import Link
from halfstep_torch.numbers.global_norm import PLAIN_SUMS, Sums
from halfstep_torch.storage.base_codes import NAN_SCALE
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import State

Measured = dict[tuple[int, int], Mapping[str, Tensor]]
"""Numbers that depend on all gradients, by group and link index."""


@dataclasses.dataclass
class Batch:
    """Slots with the same stages on one device, and the numbers of their counts.

    Attributes:
        group: the group of the slots.
        plan: the plan of the slots, except for short blocks.
        device: the device of all slots.
        grad_dtype: the dtype of all gradients.
        slots: the parameters.
        whole: the batch from which these slots are chosen, and their places there.
        steps: the count of each slot after this step.
        numbers: the numbers of each rule, for each of these counts.
        host_keys: the keys of their random words, a column for each slot.
        kernels: the kernel of each stage or None, and an empty list for plain steps.
        grad_addresses: the addresses of the gradients, if all slots are whole parameters.
        late: numbers that depend on all gradients, if kept on the device, with at least a row for each slot.
    """

    group: ReadGroup
    plan: Plan
    device: torch.device
    grad_dtype: torch.dtype
    slots: list[Slot]
    whole: "Batch | None" = None
    places: np.ndarray | None = None
    steps: Sequence[int] = ()
    numbers: dict[int, list[Values]] = dataclasses.field(default_factory=dict)
    host_keys: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
    kernels: Sequence[Kernel | None] = ()
    grad_addresses: np.ndarray | None = None
    late: Tensor | None = None
    # Not for copies with other slots.
    rows: "list[_Rows]" = dataclasses.field(default_factory=list, init=False)
    tables: dict[tuple, np.ndarray] = dataclasses.field(default_factory=dict, init=False)
    memory: dict[tuple, tuple[list[int], list[int]]] = dataclasses.field(default_factory=dict, init=False)

    def extended(self, slots: Sequence[Slot]) -> "Batch":
        """Return the batch with more slots, which keeps the rows of tables."""
        made = dataclasses.replace(self, slots=[*self.slots, *slots], grad_addresses=None)
        made.rows = self.rows
        return made

    def part(self, places: np.ndarray) -> "Batch":
        """Return the batch of some slots, which reads the rows of tables that this one keeps."""
        slots = [self.slots[i] for i in places]
        return Batch(
            self.group, self.plan, self.device, self.grad_dtype, slots, self, places, kernels=self.kernels
        )

    @functools.cached_property
    def measuring(self) -> list[int]:
        """The stages with numbers that depend on all gradients and stay on the device."""
        links = [self.group.links[j] for j in self.plan.rule_indices]
        return [k for k, rules in enumerate(self.plan.bounds) if any(links[i].measures for i in rules)]

    @functools.cached_property
    def owners(self) -> list[Tensor]:
        """The parameters."""
        return [slot.owner for slot in self.slots]

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """The indices of the parameters in the launch."""
        return np.array([slot.index for slot in self.slots], np.intp)

    @functools.cached_property
    def ending(self) -> np.ndarray:
        """The indices of the parameters that end their step with this batch."""
        return np.array([slot.index for slot in self.slots if slot.ends], np.intp)

    @functools.cached_property
    def _have_all(self) -> bool:
        """Whether each slot is all of its parameter's local part."""
        return self.whole is not None or all(slot.has_all for slot in self.slots)

    @functools.cached_property
    def _are_shards(self) -> bool:
        return self.whole is None and any(map(is_sharded, self.owners))

    @functools.cached_property
    def all_places(self) -> list[int]:
        """The places of all slots."""
        return list(range(len(self.slots)))

    def run_at_once(self) -> bool:
        """Step all slots by one call of a kernel, or return False without a step if that is impossible."""
        kernel = self.kernels[0] if len(self.plan.bounds) == 1 and self.kernels else None
        if kernel is None or self.grad_addresses is None:
            return False
        places, rest = self.by_memory(0, self.all_places, _Gradients(self))
        if rest:
            return False
        table, late = self.table(0, places, self.grad_addresses, None), self.late_numbers(0)
        kernel(table, *self.inputs(0, places, late), late=late)
        return True

    def table(
        self, k: int, places: Sequence[int], incoming: np.ndarray, outgoing: np.ndarray | None
    ) -> np.ndarray:
        """Return the table of the k-th stage's kernel, given the addresses of gradients and updates."""
        key = k, places[0], len(places)
        if key not in self.tables or self.slots[0].gathered:  # into other memory in each step
            self.tables[key] = self._rows(k).table((self.whole or self).slots, self._in_whole(places))
        table = self.tables[key]
        table[:, len(FIELDS) + 1] = incoming
        if outgoing is not None:
            table[:, len(FIELDS) + 2] = outgoing
        return table

    def by_memory(
        self, k: int, places: Sequence[int], incoming: Mapping[int, Tensor]
    ) -> tuple[list[int], list[int]]:
        """Return the slots that a kernel can update, and the others."""
        key = k, places[0], len(places)
        if key not in self.memory:
            kernel, rows = self.kernels[k], self._rows(k)
            assert kernel is not None
            pairs = zip(places, self._in_whole(places), strict=True)
            takes = [rows.takes(at, self.slots[i], incoming, i, kernel) for i, at in pairs]
            flat = [i for i, taken in zip(places, takes, strict=True) if taken]
            self.memory[key] = flat, [i for i, taken in zip(places, takes, strict=True) if not taken]
        return self.memory[key]

    def _rows(self, k: int) -> "_Rows":
        whole = self.whole or self
        while len(whole.rows) <= k:
            whole.rows.append(_Rows(len(whole.rows)))
        return whole.rows[k]

    def _in_whole(self, places: Sequence[int]) -> Sequence[int]:
        return places if self.places is None else self.places[places].tolist()

    def inputs(
        self, k: int, places: Sequence[int], late: tuple[int, Tensor] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the keys of slots, the k-th stage's numbers by count, and the row of each slot.

        Numbers on a device are left out if the stage has `late_numbers`.
        """
        rows, rules = [], self.plan.bounds[k]
        for of_rules in self.numbers.values():
            of_stage = flat(of_rules[rules.start : rules.stop])
            if late is not None:
                of_stage = [0.0 if isinstance(x, Tensor) else x for x in of_stage]
            rows.append([*map(float, of_stage)])
        numbers, keys, which = np.array(rows, np.float32), self.host_keys, None
        if len(self.numbers) > 1:
            at = {step: i for i, step in enumerate(self.numbers)}
            which = np.array([at[self.steps[i]] for i in places], np.int32)
        return (
            np.ascontiguousarray(keys if len(places) == len(self.slots) else keys[:, places]),
            numbers,
            which,
        )

    def late_numbers(self, k: int) -> tuple[int, Tensor] | None:
        """Return the numbers that the k-th stage's kernel reads on the device."""
        kernel = self.kernels[k] if self.kernels else None
        return (0, self.late) if self.late is not None and kernel is not None and kernel.reads_late else None

    def gradient_addresses(self) -> np.ndarray:
        """Return the addresses of all slots' gradients."""
        return np.array([slot.grad.data_ptr() for slot in self.slots], np.int64)

    def gradients(self, places: Iterable[int]) -> dict[int, Tensor]:
        """Return the gradients of slots, given by their indices."""
        if not self._have_all:
            return {place: self.slots[place].grad for place in places}
        owners: list[Array] = self.owners
        if self._are_shards:
            return {place: local_part(owners[place].grad).detach() for place in places}
        grads = [(place, owners[place].grad) for place in places]
        return {place: grad.detach() if grad.requires_grad else grad for place, grad in grads}

    def stage_numbers(self, k: int) -> dict[int, list[Values]]:
        """Return the numbers of the k-th stage's rules for each count, by name."""
        rules = self.plan.bounds[k]
        return {step: of_rules[rules.start : rules.stop] for step, of_rules in self.numbers.items()}


class _Gradients(dict):
    """The gradients of a batch by place, fetched when they are read."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __missing__(self, place: int) -> Tensor:
        return self._batch.slots[place].grad


class _Rows:
    """The rows of a batch in the tables of a stage's kernel, each made once and chosen by its place.

    They hold no batch, so a dropped launch is freed at once, with its references to state.
    """

    def __init__(self, k: int) -> None:
        self._k, self._takes = k, {}
        self._rows, self._made = np.zeros((0, 0), np.int64), np.zeros(0, bool)

    def table(self, slots: Sequence[Slot], places: Sequence[int]) -> np.ndarray:
        """Return rows of a batch with these slots, without the addresses of gradients and updates."""
        if len(self._made) < len(slots):
            more = len(slots) - len(self._made)
            empty = np.zeros((more, len(self._row(slots[0]))), np.int64)
            self._rows = np.concatenate([self._rows.reshape(-1, empty.shape[1]), empty])
            self._made = np.concatenate([self._made, np.zeros(more, bool)])
        chosen = np.array(places, np.intp)
        for place in chosen[~self._made[chosen]]:
            self._rows[place], self._made[place] = self._row(slots[place]), not slots[place].gathered
        return self._rows[chosen]

    def takes(self, place: int, slot: Slot, incoming: Mapping[int, Tensor], i: int, kernel: Kernel) -> bool:
        """Whether a kernel can update a slot, given all incoming gradients and the slot's place in them."""
        if place not in self._takes:
            stage = slot.plan.stages[self._k]
            self._takes[place] = slot.is_flat(incoming[i]) and kernel.takes(stage, slot.window)
        return self._takes[place]

    def _row(self, slot: Slot) -> list[int]:
        stage = slot.plan.stages[self._k]
        changing = [slot.param] * (1 if stage.applies else 2)  # each step writes their addresses
        return row_of(stage, slot.window, [slot.param, *changing, *(slot.state[x] for x in stage.arrays)])


def add_to_batches(
    batches: dict[tuple, Batch],
    parameters: Iterable[tuple[int, str, Tensor]],
    read_group: Callable[[int], ReadGroup],
    states: MutableMapping[Tensor, State],
    slots_of: Callable[[ReadGroup, str, Tensor], Sequence[Slot]],
) -> None:
    """Check the parameters that have a gradient, and add new ones to batches.

    New parameters get zeros in `states`.

    Args:
        batches: the batches by kind.
        parameters: triples (group index, leaf name, parameter), in the same order in all calls.
        read_group: a function that reads a group.
        states: the states of the parameters.
        slots_of: a function that makes the slots of a parameter.
    """
    groups = {batch.group.index: batch.group for batch in batches.values()}
    known = {slot.index for batch in batches.values() for slot in batch.slots}
    checked: list[tuple[str, Tensor]] = []
    made: dict[tuple, list[Slot]] = {}
    for index, (i, name, param) in enumerate(parameters):
        if (grad := param.grad) is None:
            continue
        checked.append((name, param))
        if index in known:
            continue
        if i not in groups:
            groups[i] = read_group(i)
        group, state = groups[i], states.get(param)
        if not state or "step" not in state:
            check_weight(group.caller, name, param)
        check_grad(group.caller, name, param)
        if has_memory(param) and not is_sharded(param) and is_other_view(grad, param):
            param.grad = grad.clone()  # a step in pieces would read weights that have moved
        of_param = slots_of(group, name, param)
        # Otherwise all entries are foreign.
        if state and ("step" in state or not state.keys().isdisjoint(of_param[0].whole_plan.arrays)):
            check_count(group.caller, name, state.get("step"))
        for slot in of_param:
            slot.index = index
            kind = (i, id(slot.plan.shared), param.device, grad.dtype, slot.gathered)
            made.setdefault(kind, []).append(slot)
    for i in [*groups][:1]:
        check_memory(groups[i].caller, checked)  # memory may be shared since they were added
    for kind, slots in made.items():
        i, _, device, grad_dtype, _ = kind
        for slot in slots:
            slot.attach(groups[i].caller, states[slot.owner])
            if groups[i].capturable:
                count_on_device(slot.owner, states[slot.owner])
                slot.counter = states[slot.owner]["step"]
        batches.setdefault(kind, Batch(groups[i], slots[0].plan, device, grad_dtype, []))
        batches[kind] = batches[kind].extended(slots)


def check_finite(caller: str, batches: Sequence[Batch]) -> None:
    """Raise ValueError for a non-finite gradient or moment if a rule would spread it."""
    for batch in batches:
        links = [batch.group.links[j] for j in batch.plan.rule_indices]
        if not any([link.needs_finite for link in links]):
            continue
        slots = [slot for slot in batch.slots if slot.grad.numel()]
        if not slots:
            continue
        marks = {(slot.name, "gradient"): torch.linalg.vector_norm(slot.grad, math.inf) for slot in slots}
        for slot in slots:
            arrays = {key: spec for x in slot.plan.moments for key, spec in x.arrays.items()}
            marks |= {(slot.name, f"state '{key}'"): _mark(arrays[key], slot.state[key]) for key in arrays}
        # The host waits once for the whole batch.
        finite = torch.stack([x.to(batch.device, torch.float32) for x in marks.values()]).isfinite().tolist()
        for (name, what), is_finite in zip(marks, finite, strict=True):
            if not is_finite:
                cure = "or clip" if what == "gradient" else "or load a state from before it"
                raise ValueError(
                    f"{caller}: the {what} of '{name}' has an infinity or a NaN, and the factor would make "
                    f"NaN of its whole matrix. Leave the step out, {cure}. Nothing was changed."
                )


def _mark(spec: StateArray, x: Tensor) -> Tensor:
    """Return a number that is finite if the codes or the scales of a moment are."""
    if spec.scale_of is not None:
        return torch.where((x == NAN_SCALE).any(), math.inf, 0.0)
    if not x.is_floating_point():
        return torch.zeros(())
    return torch.linalg.vector_norm(x if x.itemsize > 1 else x.to(torch.float32), math.inf)


Late = Callable[[Link, Values, Sequence[Tensor]], Mapping[str, Tensor] | None]
"""Function from a link, its values and all gradients to measured numbers on a device, or None."""


def measure(
    batches: Sequence[Batch], sums: Sums = PLAIN_SUMS, late: Late = lambda link, h, grads: None
) -> Measured:
    """Return the measures of links that depend on all gradients, by group and link index.

    `sums` has the bits of `PLAIN_SUMS`.

    Processes of a mesh exchange words here, once for each link of a chain in all its groups.
    """
    measured: Measured = {}
    norms: dict[tuple, Callable[[bool], Tensor]] = {}
    for batch in sorted(batches, key=lambda batch: batch.group.index):
        for j in batch.plan.rule_indices:
            link, key = batch.group.links[j], (batch.group.index, j)
            if link.measures and key not in measured:
                of_link = norms.setdefault(
                    (id(link), batch.group.scale), _norms_of(batches, link, batch.group.scale, sums)
                )
                h, slots = batch.group.values[j], _slots_of(batches, link)
                known = None
                if batch.group.scale is None and all(type(slot) is Slot for slot in slots):
                    known = late(link, h, [slot.grad for slot in slots])
                measured[key] = link.measure(h, of_link) if known is None else known
    return measured


def _norms_of(
    batches: Iterable[Batch], link: Link, scale: float | None, sums: Sums
) -> Callable[[bool], Tensor]:
    """Return a function that computes the `norms` of the gradients for a link, once."""

    @functools.cache
    def norms(exact: bool) -> Tensor:
        slots = _slots_of(batches, link)
        grads = [slot.grad for slot in slots]
        held = [slot.held for slot in slots]
        if scale is not None:
            return norms_of_shards(Unscaled(grads, scale), held, exact=exact)
        return norms_of_shards(grads, held, exact=exact, sums=sums)

    return norms


def _slots_of(batches: Iterable[Batch], link: Link) -> list[Slot]:
    """Return the slots that a link steps, in the same order in all processes."""
    having = (x for x in batches if any(x.group.links[j] is link for j in x.plan.rule_indices))
    return sorted((slot for batch in having for slot in batch.slots), key=lambda slot: slot.index)
