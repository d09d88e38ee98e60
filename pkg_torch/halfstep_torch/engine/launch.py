"""A step that was built once, to be run again: what makes it stale, and what it takes up anew.

built once   checks of parameters, gradients and state; plans; rows; kernels
each step    counts; numbers of groups whose entries are other objects; keys of random words
kept         what the state and the rows hold anyhow, and no gradient
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.optimizer_state.form import HEADER, LAST_STEP

# Entries of a group that no link reads: parameters and their names are part of the key.
_NOT_NUMBERS = ("params", "param_names", HEADER)
_UNCHANGING = (bool, int, float, str, type(None), torch.dtype)


class Key(NamedTuple):
    """What makes a launch stale: of every parameter with a gradient, in their order.

    Attributes:
        weights: where they are in memory, and what. Whose they are, the arrays say.
        grads: what they are. Their addresses are no part: rows find them anew at every step, and keep none.
        names: of the state arrays.
        arrays: where they are in memory, and what.
        counts: how much more often than the first it was stepped: those of equal counts go together.
        choice: whether steps are compiled.
        threads: of the CPU, which Inductor writes into a kernel.
    """

    weights: list[tuple]
    grads: list[tuple]
    names: list[str]
    arrays: list[tuple]
    counts: list[int]
    choice: bool | str
    threads: int


class Launch:
    """The step of parameters that are whole in this process, as it was built.

    It is stale when its `key` is another: what any check, plan, row or kernel depends on. Numbers are none of
    it; a group is read again, and checked, when one of its entries is another object than before, or one that
    can change in place, as a tensor.

    Attributes:
        batches: that are run.
    """

    def __init__(
        self,
        listed: Sequence[Tensor],
        states: Mapping[Tensor, Any],
        groups: Sequence[dict[str, Any]],
        batches: Sequence[Batch],
        choice: CompileChoice,
    ) -> None:
        self.batches = batches
        self._listed = listed
        self._slots = sorted((slot for batch in batches for slot in batch.slots), key=lambda slot: slot.index)
        self._key, _ = _key_of(listed, states, choice)
        reads = {batch.group.index: batch.group for batch in batches}
        self._groups = {i: (read, read.plan_key, _Entries(groups[i], read)) for i, read in reads.items()}
        elements = ((batch, sum(slot.param.numel() for slot in batch.slots)) for batch in batches)
        self._eager = [(batch.device, n) for batch, n in elements if not batch.kernels]

    def renew(self, listed: Sequence[Tensor], optimizer: Any, scale: float | None) -> bool:
        """Have the numbers and counts of a step; return False, and have none, if it is to be built anew.

        `scale` is that of the gradients. Raises what reading a group raises.
        """
        if len(listed) != len(self._listed) or not all(map(operator.is_, listed, self._listed)):
            return False
        try:
            key, steps = _key_of(listed, optimizer.state, optimizer._compile)
        except Exception:  # what is wrong with it, the build says
            return False
        if key != self._key or not self._read_groups(optimizer, scale):
            return False
        if any(optimizer._compile.is_due(*of_batch) for of_batch in self._eager):
            return False
        for slot, step in zip(self._slots, steps, strict=True):
            slot.step = step
        for batch in self.batches:
            batch.group = self._groups[batch.group.index][0]
        return True

    def _read_groups(self, optimizer: Any, scale: float | None) -> bool:
        """Read the groups again that may have other numbers; return False if plans follow."""
        for i, (read, plan_key, entries) in self._groups.items():
            group = optimizer.param_groups[i]
            if read.scale == scale and entries.are_those_of(group):
                continue
            read = optimizer._group(i)
            if read.plan_key != plan_key:
                return False
            self._groups[i] = read, plan_key, _Entries(group, read)
        return True


class _Entries:
    """The entries of a group, by which it is known that none is another object."""

    def __init__(self, group: Mapping[str, Any], read: ReadGroup) -> None:
        self._keys, self._values = list(group), list(group.values())
        values = [value for key, value in group.items() if key not in _NOT_NUMBERS]
        values += [x for value in values if type(value) is tuple for x in value]
        self._stay = read.choices.schedule is None and all(
            isinstance(x, (*_UNCHANGING, tuple)) for x in values
        )

    def are_those_of(self, group: Mapping[str, Any]) -> bool:
        """Whether a group has these very entries, and none can have changed in place."""
        same = len(group) == len(self._keys) and all(map(operator.is_, group.values(), self._values))
        return self._stay and same and list(group) == self._keys


def _key_of(
    listed: Sequence[Tensor], states: Mapping[Tensor, Any], choice: CompileChoice
) -> tuple[Key, list[int]]:
    """Return the key of the parameters that have a gradient, and their counts after this step."""
    pairs = [(p, p.grad) for p in listed]
    pairs = [(p, g) for p, g in pairs if g is not None]
    held: list[Any] = [states.get(p) for p, _ in pairs]
    steps = [state["step"].item() + 1 for state in held]
    if steps and max(steps) > LAST_STEP:
        steps = [min(step, LAST_STEP) for step in steps]
    key = Key(
        [(type(p), p.data_ptr(), p.dtype, p.shape, p.stride(), p.device) for p, _ in pairs],
        [(type(g), g.dtype, g.shape, g.device, g.layout, g.is_contiguous()) for _, g in pairs],
        [name for state in held for name in state],
        [(id(x), x.data_ptr(), x.dtype, x.shape) for state in held for x in state.values()],
        [step - steps[0] for step in steps],
        choice.choice,
        torch.get_num_threads(),
    )
    return key, steps
