"""A step that is built once and run many times, until one of its facts changes.

built once   checks of parameters, gradients and state; plans; rows; kernels; exchanges between processes
each step    counts; numbers of groups with a replaced entry; keys of random words
kept         references to state and to tables; no gradient
"""

import itertools
import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.triton_process import compile_at_once
from halfstep_torch.engine.batches import Batch, Measured, add_to_batches, check_finite, measure
from halfstep_torch.engine.capture import Captures, check_capture
from halfstep_torch.engine.gradient_norms import GradientNorms
from halfstep_torch.engine.groups import ReadGroup, read_on_device
from halfstep_torch.engine.kernels.kernel import Kernel, kernel_of
from halfstep_torch.engine.key import KnownKey
from halfstep_torch.engine.number_places import number_places
from halfstep_torch.engine.run import run_batch
from halfstep_torch.engine.scaled_step import ScaledStep
from halfstep_torch.engine.scaling import NotScaling
from halfstep_torch.engine.slots import Slot
from halfstep_torch.engine.step_numbers import attach_keys, attach_numbers, sharing_streams, some_sharing
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.leaves.memory import has_memory
from halfstep_torch.links.chain import HEADER
from halfstep_torch.sharded.exchange import meshes_of, talking_meshes
from halfstep_torch.sharded.run import exchange_all, step_apart
from halfstep_torch.sharded.state_home import StateOwner
from halfstep_torch.storage.stored_moment import State

# Entries of a group that no link reads, because parameters and their names are part of the key.
_NOT_NUMBERS = ("params", "param_names", HEADER)
_GRAD = operator.attrgetter("grad")
_UNCHANGING = (bool, int, float, str, type(None), torch.dtype)

Parameters = Sequence[tuple[int, str, Tensor]]


class Launch:
    """The built step of some parameters.

    It is stale when the `Facts` about parameters with a gradient change, because checks, plans, rows and
    kernels depend on them. Numbers are not such facts. A group is read and checked again if an entry is
    replaced by another object, a format has another description, or an entry can change in place, such as a
    tensor. Each step chooses the plain tensors with a gradient, and adds new ones.

    Attributes:
        batches: the batches to run.
        on_meta: batches on the meta device, which only make state.
        meshes: the meshes of all parameters, with or without a gradient.
        talking: meshes with an exchange between processes in the step.
        has_schedules: whether the lr of a group is a function of the step.
        watches_rates: whether a rule depends on the largest rate of the run.
        is_new: whether it was not run since parameters were added.
        captures: the steps of batches that CUDA graphs may capture.
        needs_no_host: whether the next step consists only of these.
    """

    def __init__(self, optimizer: StateOwner, named: Parameters) -> None:
        """Check and sort parameters."""
        self._listed, self._choice = [param for _, _, param in named], optimizer._compile.choice
        self._compile = optimizer._compile
        self._kinds: dict[tuple, Batch] = {}
        self._groups: dict[int, tuple[ReadGroup, _Entries]] = {}
        self._numbers, self._key = {}, KnownKey(len(named))
        self._states: tuple[list[Tensor], list] = [], []
        self._pairs: dict[int, ScaledStep | None] = {}  # by the id of a batch that is held
        self._scaled: dict[int, ScaledStep] = {}
        self.captures, self.needs_no_host = Captures(), False
        self.meshes, self._lacks = meshes_of(self._listed), False
        self._add(optimizer, named)

    def _add(self, optimizer: StateOwner, named: Parameters) -> None:
        """Check parameters that have a gradient, and sort new ones into batches."""
        add_to_batches(self._kinds, named, optimizer._group, optimizer.state, optimizer._home.slots_of)
        batches = [*self._kinds.values()]
        self.talking = talking_meshes(batches)
        batches, actions = optimizer._home.arrange(batches)
        self._actions = [action for action in actions if action.slots]
        links = [batch.group.links[j] for batch in batches for j in batch.plan.rule_indices]
        self._may_capture = any(batch.group.capturable for batch in batches)
        self._looks = any(link.measures or link.needs_finite for link in links)
        self.has_schedules = any(batch.group.choices.schedule is not None for batch in batches)
        self.watches_rates = any(hasattr(x.rule, "peak_lr") for batch in batches for x in batch.group.links)
        self._wholes = [batch for batch in batches if has_memory(batch.slots[0].param)]
        for batch in self._wholes:
            batch.grad_addresses = None
        self.on_meta = [batch for batch in batches if not has_memory(batch.slots[0].param)]
        self._all_sharing = sharing_streams(self._wholes)
        slots = [slot for batch in batches for slot in batch.slots]
        self._chooses = not self.on_meta and all(type(slot) is Slot for slot in slots)
        self._exchanging = np.array([slot.index for slot in slots if slot.exchanges], np.intp)
        counters = {slot.index: slot.counter for slot in slots}
        room = sum(len(group["params"]) for group in optimizer.param_groups)
        self._counts = optimizer._counts.of(counters, len(self._listed), optimizer.state.values(), room)
        self._names = {index: slot.name for index, slot in ((slot.index, slot) for slot in slots)}
        self.is_new, self._has = True, [param.grad is not None for param in self._listed]
        self._choose(np.flatnonzero(self._has))
        self._set_steps(self._counts.next())

    def _choose(self, places: np.ndarray) -> None:
        """Choose parameters, given their places among all of the launch."""
        self._places, self._chosen_states = places, None
        chosen = np.zeros(len(self._listed), bool)
        chosen[places] = True
        parts: dict[int, Batch] = {}
        for whole in self._wholes:
            at = np.flatnonzero(chosen[whole.indices])
            if len(at):
                parts[id(whole)] = whole if len(at) == len(whole.slots) else whole.part(at)
        self.batches, self._sharing = [*parts.values()], self._all_sharing
        if len(parts) < len(self._wholes) or any(batch.whole for batch in self.batches):
            self._sharing = some_sharing(self._all_sharing, parts)
        self._norms = GradientNorms(self._compile)  # it keeps a table for each set of gradients
        held = {*map(id, self._wholes)}
        for of_batches in (self._pairs, self._scaled):
            for gone in of_batches.keys() - held:
                del of_batches[gone]
        if self._may_capture:
            self.captures.keep([*self._wholes, *self.batches])
            self.needs_no_host = self.captures.have_all(self.batches)
        orders = np.cumsum(chosen) - 1
        self._orders = [orders[batch.indices] for batch in self.batches]

    def holds(self, listed: Sequence[Tensor], optimizer: StateOwner) -> bool:
        """Whether the facts about these parameters are unchanged, so that the launch still fits."""
        self._lacks = False
        if (
            self.is_new
            or self._choice != optimizer._compile.choice
            or len(listed) != len(self._listed)
            or not all(map(operator.is_, listed, self._listed))
        ):
            return False
        grads = [*map(_GRAD, listed)]
        has = [*map(operator.is_not, grads, itertools.repeat(None))]
        try:
            if has != self._has and not self._take(has):
                return False
            weights = [*itertools.compress(listed, self._has)]
            grads = [*itertools.compress(grads, self._has)]
            reading = self._key.fits(weights, grads, self._held(weights, optimizer.state))
            on_device = self.needs_no_host and not self._lacks
            steps = self._steps if on_device else self._counts.next()
        except Exception:  # building the step anew raises the error
            reading = None
        if reading is None or steps[self._places].min() < 1:
            self._lacks = False
            return False
        if steps is not self._steps:
            self._set_steps(steps)
        if self._chooses:
            for batch, order in zip(self.batches, self._orders, strict=True):
                batch.grad_addresses = reading.addresses[order]
        return not self._lacks

    def check_capture(self, optimizer: StateOwner) -> None:
        """Raise RuntimeError unless a CUDA graph may record the step."""
        without = [
            i
            for i, (p, has) in enumerate(zip(self._listed, self._has, strict=True))
            if not has and p.requires_grad
        ]
        names = [self._names.get(i) or str(i) for i in without]
        check_capture(optimizer._name, self.batches, names)

    def _take(self, has: list[bool]) -> bool:
        """Choose other known parameters with a gradient. Return False if this is impossible."""
        places = np.flatnonzero(has)
        known = self._key.known[places]
        if not self._chooses or not known.any():
            return False
        self._lacks = not known.all()
        self._has = [*map(operator.and_, has, self._key.known.tolist())]
        self._choose(places[known])
        self._key.choose(places[known])
        return True

    def _held(self, weights: Sequence[Tensor], states: Mapping[Tensor, State]) -> list:
        """Return the states of the chosen parameters. Looking up a tensor is slower than comparing.

        Raises:
            LookupError: if a stepped parameter has no state any more, so that the state can be freed.
        """
        keys, values = self._states
        same = len(keys) == len(states) and all(map(operator.is_, keys, states))
        if not same or not all(map(operator.is_, values, states.values())):
            if not all(self._listed[i] in states for i in np.flatnonzero(self._key.known)):
                raise LookupError("the state of a parameter is gone")
            self._states, self._chosen_states = ([*states], [*states.values()]), None
        if self._chosen_states is None:
            self._chosen_states = [*map(states.get, weights)]
        return self._chosen_states

    def extend(self, optimizer: StateOwner, named: Parameters, scale: float | None) -> bool:
        """Add new parameters if `holds` found no other change, else return False."""
        if not self._lacks or not self.renew(optimizer, scale, self._wholes):
            return False
        self._add(optimizer, named)
        return True

    def renew(self, optimizer: StateOwner, scale: float | None, batches: Sequence[Batch] = ()) -> bool:
        """Read the groups of a step, after `holds`. Return False if the launch must be rebuilt.

        `scale` is the scale of the gradients. Raises an error where reading a group raises one.
        """
        for batch in batches or self.batches:
            i = batch.group.index
            (before, entries), group = self._groups[i], optimizer.param_groups[i]
            on_device = before.tensors is not None
            if before.scale != scale or not entries.are_those_of(group, on_device):
                read = optimizer._group(i)
                if read.capturable != before.capturable:
                    return False
                read = read_on_device(read, batch.device, before) if on_device else read
                if read.plan_key != before.plan_key and not self._keeps_plans(read):
                    return False
                self._groups[i] = read, _Entries(group, read)
            batch.group = self._groups[i][0]
        return True

    def _set_steps(self, steps: np.ndarray) -> None:
        """Set the counts after this step, by the parameters' indices."""
        self._steps = steps
        for batch in (*self.batches, *self.on_meta):
            batch.steps = steps[batch.indices].tolist()

    def _keeps_plans(self, read: ReadGroup) -> bool:
        """Whether the plans of a group's parameters are unchanged. Most numbers do not affect a plan."""
        slots = (slot for batch in self._wholes if batch.group.index == read.index for slot in batch.slots)
        return all(read.plan(slot.name, slot.owner) == slot.whole_plan for slot in slots)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Pairs of a group's index and its parameters' count after the step."""
        return [(batch.group.index, max(batch.numbers)) for batch in self.batches]

    @property
    def moves(self) -> bool:
        """Whether any gradient is not 0."""
        slots = (slot for batch in (*self.batches, *self.on_meta) for slot in batch.slots)
        return any(not has_memory(slot.param) or bool(slot.grad.any()) for slot in slots)

    def bring(self) -> Measured:
        """Move gradients to their weights. Return the numbers that links measure over all gradients."""
        for action in self._actions:
            action.bring()
        return measure(self.batches, self._norms.sums, self._norms.late) if self._looks else {}

    def prepare(self, optimizer: StateOwner, measured: Measured) -> None:
        """Prepare numbers, keys, kernels and rows. Failures are raised here, before weights change."""
        if self._looks:
            check_finite(optimizer._name, self.batches)
        self._numbers = attach_numbers(self.batches, measured, self._numbers)
        for batch in self.batches:
            if not batch.kernels or None in batch.kernels:
                self._find_kernels(optimizer)
                break
        attach_keys(self._sharing)
        if self._may_capture:
            self._make_captures()

    def _make_captures(self) -> None:
        """Make the steps of capturable batches, which read their groups on the device."""
        self.captures.make(self.batches)
        for batch in self.batches:
            if (known := self._groups.get(batch.group.index)) is not None:
                self._groups[batch.group.index] = batch.group, known[1]
        self.needs_no_host = not self.meshes and self.captures.have_all(self.batches)

    def _find_kernels(self, optimizer: StateOwner) -> None:
        """Find the built kernels, two for a whole batch or one for each stage."""
        name, choice = optimizer._name, optimizer._compile
        some = [batch for batch in self.batches if not batch.kernels or None in batch.kernels]
        some = [batch for batch in some if choice.wants(name, batch.device)]
        # Every compiler is started before the first wait.
        asked = [self._kernels_of(batch) for batch in some]
        compile_at_once([kernel.request for kernel in {x: None for kernels in asked for x in kernels if x}])
        for batch, kernels in zip(some, asked, strict=True):
            found = [kernel if kernel and choice.has(name, kernel) else None for kernel in kernels]
            if (pair := self._pairs[id(batch)]) is None:
                batch.kernels = (batch.whole or batch).kernels = found
            elif None not in found:
                self._scaled[id(batch)] = pair

    def _kernels_of(self, batch: Batch) -> Sequence[Kernel | None]:
        """Return the kernels of a batch, which may not be built yet."""
        if id(batch) not in self._pairs:
            try:
                self._pairs[id(batch)] = ScaledStep(batch)
            except NotScaling:
                self._pairs[id(batch)] = None
        if (pair := self._pairs[id(batch)]) is not None:
            return pair.kernels
        made = []
        for k, stage in enumerate(batch.plan.padded_stages):
            numbers, *_ = batch.stage_numbers(k).values()
            incoming = torch.float32 if k else batch.grad_dtype
            kernel = (stage, number_places(tuple(numbers)), incoming, batch.device)
            made.append(kernel_of(*kernel) if stage.compiles else None)
        return made

    def run(self) -> None:
        """Step the batches and increment their counts. Weights, state and counts change."""
        waiting = []
        if self.needs_no_host:
            self.captures.run(self.batches)
            return
        for batch in self.batches:
            waiting += run_batch(batch, step_apart, self._scaled.get(id(batch)))
            self._counts.set(self._steps, batch.ending)
        # Slots that need words from other processes wait here until all such slots have reached the rule.
        while waiting:
            exchange_all([x for _, of_walk in waiting for x in of_walk])
            waiting = [(walk, asked) for walk, _ in waiting if (asked := next(walk, None)) is not None]
        for action in self._actions:
            action.end()
        if len(self._exchanging):
            self._counts.set(self._steps, self._exchanging)
        for batch in self.on_meta:
            self._counts.set(self._steps, batch.ending)

    def forget(self) -> None:
        """Drop the tensors that were brought for this step."""
        for action in self._actions:
            action.forget()

    def keep(self, optimizer: StateOwner) -> None:
        """Store the key of the chosen parameters, so that the launch can run again."""
        if not self.is_new or self.on_meta or not self.batches:
            return
        for batch in self.batches:
            if batch.group.index not in self._groups:
                group = optimizer.param_groups[batch.group.index]
                self._groups[batch.group.index] = batch.group, _Entries(group, batch.group)
        weights = [*itertools.compress(self._listed, self._has)]
        held = self._held(weights, optimizer.state)
        self._key.put(self._places, weights, [*map(_GRAD, weights)], held)
        self.is_new = False


class _Entries:
    """The entries of a group, to detect one that is replaced by another object."""

    def __init__(self, group: Group, read: ReadGroup) -> None:
        self._keys, self._values = list(group), list(group.values())
        values = [value for key, value in group.items() if key not in _NOT_NUMBERS]
        # Formats by their descriptions, which change with the format in place.
        self._formats = [value for value in values if type(value) is dict]
        self._said = [dict(value) for value in self._formats]
        values += [x for value in values if type(value) is tuple for x in value]
        values += [x for said in self._said for x in said.values()]
        self._stay = (
            read.choices.schedule is None
            and read.rates is None
            and all(isinstance(x, (*_UNCHANGING, tuple)) for x in values if type(x) is not dict)
        )

    def are_those_of(self, group: Group, may_change: bool) -> bool:
        """Whether a group still has these entries, and none was changed in place unless `may_change`."""
        same = len(group) == len(self._keys) and all(map(operator.is_, group.values(), self._values))
        return (
            (self._stay or may_change) and same and list(group) == self._keys and self._formats == self._said
        )
