"""A step that is built once and run many times: what makes it stale, and what each run reads again.

built once   checks of parameters, gradients and state; plans; rows; kernels; what processes exchange
each step    counts; numbers of groups whose entries are other objects; keys of random words
kept         what the state and the rows hold anyhow, and no gradient
"""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep_torch.distributed.shards import are_plain, local_part, sharding
from halfstep_torch.engine.batches import Batch, Measured, check_finite, make_batches, measure
from halfstep_torch.engine.gradient_norms import GradientNorms
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.kernels.kernel import Kernel, kernel_of
from halfstep_torch.engine.number_places import number_places
from halfstep_torch.engine.run import run_batch
from halfstep_torch.engine.scaled_step import ScaledStep
from halfstep_torch.engine.scaling import NotScaling
from halfstep_torch.engine.step_numbers import attach_keys, attach_numbers, sharing_streams
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.leaves.memory import has_memory, is_other_view
from halfstep_torch.links.chain import HEADER
from halfstep_torch.sharded.exchange import meshes_of, talking_meshes
from halfstep_torch.sharded.run import exchange_all, step_apart
from halfstep_torch.sharded.state_home import StateOwner
from halfstep_torch.storage.stored_moment import State

# Entries of a group that no link reads: parameters and their names are part of the key.
_NOT_NUMBERS = ("params", "param_names", HEADER)
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_UNCHANGING = (bool, int, float, str, type(None), torch.dtype)

Parameters = Sequence[tuple[int, str, Tensor]]


class Key(NamedTuple):
    """What a launch depends on, for every parameter with a gradient in order: a change makes it stale.

    Fields are read and compared item by item at every step. Nothing is collected on the way: tuples for a
    thousand parameters would start Python's garbage collector nine times in a step.

    Attributes:
        counts: one list: how much more often than the first each was stepped. Equal counts go together.
        names: one list: of the state arrays.
        shards: one list: meshes and placements of weights and of gradients, as far as they are DTensors.
        choice: whether steps are compiled.
        threads: of the CPU, which Inductor writes into a kernel.
        weight_classes: of what class weights are; `grad_classes` of gradients.
        weight_memory: addresses, which tell the device too. Those of gradients are no part: rows find them
            anew at every step, and keep none. Whose memory it is, the arrays say.
        weight_dtypes, weight_shapes, weight_strides: of weights.
        grad_dtypes, grad_shapes, grads_in_order: of gradients; whether they are row-major.
        arrays: which objects the state arrays are; then their addresses, dtypes and shapes.
    """

    counts: Iterable[list[int]]
    names: Iterable[list[str]]
    shards: Iterable[list]
    choice: Iterable[bool | str]
    threads: Iterable[int]
    weight_classes: Iterable[type]
    grad_classes: Iterable[type]
    weight_memory: Iterable[int]
    weight_dtypes: Iterable[torch.dtype]
    weight_shapes: Iterable[torch.Size]
    weight_strides: Iterable[tuple[int, ...]]
    grad_dtypes: Iterable[torch.dtype]
    grad_shapes: Iterable[torch.Size]
    grads_in_order: Iterable[bool]
    arrays: Iterable[int]
    array_memory: Iterable[int]
    array_dtypes: Iterable[torch.dtype]
    array_shapes: Iterable[torch.Size]


class Launch:
    """The built step of some parameters.

    It is stale when its `key` is another: what any check, plan, row or kernel depends on. Numbers are none of
    it; a group is read again, and checked, when one of its entries is another object than before, a format
    with another description, or what can change in place, as a tensor.

    Attributes:
        batches: that are run.
        on_meta: others, of which only state is made.
        meshes: of all parameters, also of those without a gradient.
        talking: those whose processes exchange anything in the step.
        has_schedules: whether the lr of a group is a function of the step.
    """

    def __init__(self, optimizer: StateOwner, named: Parameters) -> None:
        """Check and sort parameters."""
        self._listed, self._key, self._numbers = [param for _, _, param in named], None, {}
        self._pairs, self._scaled, self._norms = {}, {}, GradientNorms(optimizer._compile.uses)
        batches = make_batches(named, optimizer._group, optimizer.state, optimizer._home.slots_of)
        self.meshes, self.talking = meshes_of(self._listed), talking_meshes(batches)
        batches, actions = optimizer._home.arrange(batches)
        self._actions = [action for action in actions if action.slots]
        links = [batch.group.links[j] for batch in batches for j in batch.plan.rule_indices]
        self._looks = any(link.measures or link.needs_finite for link in links)
        self.has_schedules = any(batch.group.choices.schedule is not None for batch in batches)
        self.batches = [batch for batch in batches if has_memory(batch.slots[0].param)]
        self.on_meta = [batch for batch in batches if not has_memory(batch.slots[0].param)]
        self._sharing = sharing_streams(self.batches)
        slots = [slot for batch in (*self.batches, *self.on_meta) for slot in batch.slots]
        self._exchanging = np.array([slot.index for slot in slots if slot.exchanges], np.intp)
        by_index = {slot.index: slot.counter for slot in slots}
        counters = [by_index[i] for i in sorted(by_index)]
        room = sum(len(group["params"]) for group in optimizer.param_groups)
        self._counts = optimizer._counts.of(counters, optimizer.state.values(), room)
        self._set_steps(self._counts.next())

    def holds(self, listed: Sequence[Tensor], optimizer: StateOwner) -> bool:
        """Whether the launch still fits these parameters: its key is unchanged."""
        if (
            self._key is None
            or len(listed) != len(self._listed)
            or not all(map(operator.is_, listed, self._listed))
        ):
            return False
        try:
            steps = self._counts.next()
            key = _key_of(listed, optimizer.state, optimizer._compile.choice, steps)
            # Equal counts and names, which come first, are equally many items of all else.
            same = all(map(operator.eq, self._key, itertools.chain(*key)))
        except Exception:  # what is wrong with it, the build says
            return False
        if not same or not all(action.stays() for action in self._actions):
            return False
        self._set_steps(steps)
        return True

    def renew(self, optimizer: StateOwner, scale: float | None) -> bool:
        """Read the groups of a step, after `holds`; return False if the launch must be rebuilt.

        `scale` is that of the gradients. Raises what reading a group raises.
        """
        for i, (before, entries) in self._groups.items():
            group = optimizer.param_groups[i]
            if before.scale == scale and entries.are_those_of(group):
                continue
            read = optimizer._group(i)
            if read.plan_key != before.plan_key and not self._keeps_plans(read):
                return False
            self._groups[i] = read, _Entries(group, read)
        for batch in self.batches:
            batch.group = self._groups[batch.group.index][0]
        return True

    def _set_steps(self, steps: np.ndarray) -> None:
        """Set the counts after this step, by the parameters' indices."""
        self._steps = steps
        for batch in (*self.batches, *self.on_meta):
            batch.steps = steps[batch.indices].tolist()

    def _keeps_plans(self, read: ReadGroup) -> bool:
        """Whether the plans of a group's parameters are unchanged: most numbers do not affect a plan."""
        slots = (slot for batch in self.batches if batch.group.index == read.index for slot in batch.slots)
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
        """Bring gradients to their weights; return what links measure over all gradients."""
        for action in self._actions:
            action.bring()
        return measure(self.batches, self._norms) if self._looks else {}

    def prepare(self, optimizer: StateOwner, measured: Measured) -> None:
        """Prepare numbers, keys, kernels and rows: everything that can fail, before weights change."""
        if self._looks:
            check_finite(optimizer._name, self.batches)
        self._numbers = attach_numbers(self.batches, measured, self._numbers)
        for batch in self.batches:
            if optimizer._compile.wants(optimizer._name, batch.device):
                self._find_kernels(optimizer, batch)
        attach_keys(self._sharing)

    def _find_kernels(self, optimizer: StateOwner, batch: Batch) -> None:
        """Find the kernels of a batch that are built: two for all of it, or one for each stage."""
        if id(batch) not in self._pairs:
            try:
                self._pairs[id(batch)] = ScaledStep(batch)
            except NotScaling:
                self._pairs[id(batch)] = None
        if (pair := self._pairs[id(batch)]) is None:
            batch.kernels = [self._kernel(optimizer, batch, k) for k in range(len(batch.plan.bounds))]
        elif all([optimizer._compile.has(optimizer._name, kernel) for kernel in pair.kernels]):
            self._scaled[id(batch)] = pair

    def _kernel(self, optimizer: StateOwner, batch: Batch, k: int) -> Kernel | None:
        """Return the kernel of a batch's k-th stage, once it is compiled."""
        if batch.kernels and batch.kernels[k] is not None:
            return batch.kernels[k]
        stage = batch.plan.padded_stages[k]
        if not stage.compiles:
            return None
        numbers, *_ = batch.stage_numbers(k).values()
        incoming = torch.float32 if k else batch.grad_dtype
        kernel = kernel_of(stage, number_places(tuple(numbers)), incoming, batch.device)
        return kernel if optimizer._compile.has(optimizer._name, kernel) else None

    def run(self) -> None:
        """Step the batches and count each when it ends: weights, state and counts change."""
        waiting = []
        for action in self._actions:
            action.begin()
        for batch in self.batches:
            for action in self._actions:
                action.before(batch)
            waiting += run_batch(batch, step_apart, self._scaled.get(id(batch)))
            for action in self._actions:
                action.after(batch)
            self._counts.set(self._steps, batch.ending)
        # What has come to a rule that sees more than is here waits until all that do so have come to it.
        while waiting:
            exchange_all([x for _, of_walk in waiting for x in of_walk])
            waiting = [(walk, asked) for walk, _ in waiting if (asked := next(walk, None)) is not None]
        for action in self._actions:
            action.end()
        for indices in (self._exchanging, *(batch.ending for batch in self.on_meta)):
            self._counts.set(self._steps, indices)

    def forget(self) -> None:
        """Drop what was brought for this step."""
        for action in self._actions:
            action.forget()

    def keep(self, optimizer: StateOwner) -> None:
        """Store the key, so that the launch can run again."""
        if self._key is not None or self.on_meta or not self.batches:
            return
        reads = {batch.group.index: batch.group for batch in self.batches}
        self._groups = {i: (read, _Entries(optimizer.param_groups[i], read)) for i, read in reads.items()}
        key = _key_of(self._listed, optimizer.state, optimizer._compile.choice, self._counts.next())
        self._key = [*itertools.chain(*key)]


class _Entries:
    """The entries of a group, to notice one that is replaced by another object."""

    def __init__(self, group: Group, read: ReadGroup) -> None:
        self._keys, self._values = list(group), list(group.values())
        values = [value for key, value in group.items() if key not in _NOT_NUMBERS]
        # Formats as their descriptions: whoever changes one in place changes what it says.
        self._formats = [value for value in values if type(value) is dict]
        self._said = [dict(value) for value in self._formats]
        values += [x for value in values if type(value) is tuple for x in value]
        values += [x for said in self._said for x in said.values()]
        self._stay = read.choices.schedule is None and all(
            isinstance(x, (*_UNCHANGING, tuple)) for x in values if type(x) is not dict
        )

    def are_those_of(self, group: Group) -> bool:
        """Whether a group still has these entries, and none was changed in place."""
        same = len(group) == len(self._keys) and all(map(operator.is_, group.values(), self._values))
        return self._stay and same and list(group) == self._keys and self._formats == self._said


def _key_of(
    listed: Sequence[Tensor], states: Mapping[Tensor, State], choice: bool | str, steps: np.ndarray
) -> Key:
    """Return the key of the parameters that have a gradient, given their counts after this step."""
    weights: list[Array] = [p for p in listed if p.grad is not None]
    grads: list[Array] = [p.grad for p in weights]
    held: list[Array] = [*map(states.get, weights)]
    arrays = [x for state in held for x in state.values() if isinstance(x, Tensor)]  # others keep anything
    if len(steps) and steps.min() < 1:
        raise ValueError(f"a count is {steps.min() - 1}")  # which the build reports with its name
    shards, given = [], (weights, grads, arrays)
    if not are_plain((*weights, *grads, *arrays)):
        shards = [where for where in map(sharding, (*weights, *grads)) if where]
        weights, grads, arrays = ([*map(local_part, tensors)] for tensors in given)
    if any(map(is_other_view, grads, weights)):
        raise ValueError("a gradient is a view of its weight")  # which the build copies
    return Key(
        counts=[(steps - steps[:1]).tolist()],
        names=[[*itertools.chain.from_iterable(held)]],
        shards=[shards],
        choice=[choice],
        threads=[torch.get_num_threads()],
        weight_classes=map(type, given[0]),
        grad_classes=map(type, given[1]),
        weight_memory=map(Tensor.data_ptr, weights),
        weight_dtypes=map(_DTYPE, weights),
        weight_shapes=map(_SHAPE, weights),
        weight_strides=map(Tensor.stride, weights),
        grad_dtypes=map(_DTYPE, grads),
        grad_shapes=map(_SHAPE, grads),
        grads_in_order=map(Tensor.is_contiguous, grads),
        arrays=map(id, given[2]),
        array_memory=map(Tensor.data_ptr, arrays),
        array_dtypes=map(_DTYPE, arrays),
        array_shapes=map(_SHAPE, arrays),
    )
