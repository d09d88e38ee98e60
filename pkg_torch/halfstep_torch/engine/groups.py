"""Param groups: a group's chain, its learning rate, and the values that its links read.

A group's entries are the numbers of the links, the formats of moments, and the options of the chain
(`param_storage`, roundings). Numbers may be written at any time, others only when the group is added.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import PEAK_COUNTS, Scalar, Values
from halfstep.rules.named import Named
from halfstep.storage.formats import Format
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.loss_scale import UNSCALE
from halfstep_torch.engine.plan import Plan, bind_rules, make_plan
from halfstep_torch.engine.scheduler_rates import SchedulerRates
from halfstep_torch.engine.signals import is_capturing
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.chain import Chain, ChainByOptions
from halfstep_torch.links.link import Link, ParamInfo
from halfstep_torch.numbers.hyperparameters import nonnegative
from halfstep_torch.say_once import say_once


@dataclasses.dataclass
class GroupChoices:
    """The choices of a group, fixed when it is added.

    Attributes:
        chain: the chain for its parameters.
        options: the options of the chain.
        schedule: its lr as a function of the step, or None.
        shown: the last number of this function, which the group shows.
        applies: the links of the chain that affect a parameter, by leaf name.
        first_lr: the lr of the group when it was added.
        stepped_lr: the largest rate of past steps, 0 before the first.
        checked: the entries of the group at the last check, and the bounds of its momentum.
        plans: the key of the last plans, and these plans by kinds of parameters.
    """

    chain: Chain
    options: Group
    schedule: Callable[[int], Scalar] | None
    shown: float | None = None
    applies: dict[str, tuple[bool, ...]] = dataclasses.field(default_factory=dict)
    first_lr: Scalar = None
    stepped_lr: float = 0.0
    checked: tuple = ()
    plans: tuple[tuple | None, dict[tuple, Plan]] = (None, {})

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "plans": (None, {})}

    def rate(self, caller: str, index: int, group: Group) -> Scalar:
        """Return the lr that links read: a number, or the schedule.

        A 0 in the group is used unless a scheduler wrote it, because torch.distributed.checkpoint makes state
        by a step with lr=0 and zero gradients.
        """
        written = group.get("lr")
        if self.schedule is None:
            return written
        if written is None or float(written) == self.shown:
            return self.schedule
        if float(written) == 0 and not ("initial_lr" in group and _any_gradient(group["params"])):
            return 0.0
        say_once(
            f"{caller}: a learning rate was written into param group {index}, whose lr is a function of the "
            "step: the function decides. Pass lr as a number to use a scheduler."
        )
        return self.schedule

    @functools.cached_property
    def _largest_of_schedule(self) -> float:
        """The largest rate of a schedule at the tested counts."""
        rates, schedule = [0.0], self.schedule
        assert schedule is not None
        with contextlib.suppress(Exception):  # past the end of a list, say
            rates.extend(float(schedule(count)) for count in PEAK_COUNTS)
        return max(rates)

    def peak_lr(self, group: Group, known: Group) -> float:
        """Return the largest learning rate of the run, from the group and its schedulers.

        `known` are numbers of tensors on a device. A rate on a device is compared there.
        """
        if self.schedule is not None:
            return self._largest_of_schedule
        rates = [known.get(key, group.get(key)) for key in ("initial_lr", "max_lr")]
        on_device = group.get("lr") if "lr" in known else None
        rates += [rate for rate in (self.first_lr, group.get("lr")) if rate is not on_device]
        return max((float(rate) for rate in rates if rate is not None), default=0.0)

    def check_unchanged(self, caller: str, index: int, group: Group) -> None:
        """Raise ValueError if an option was changed after the group was added, without effect."""
        for option, chosen in self.options.items():
            if group.get(option, chosen) != chosen:
                raise ValueError(
                    f"{caller}: {option} of param group {index} was {chosen!r} when it was added, and is "
                    f"{group[option]!r} now. Write it back; to change it, build a new optimizer, and move "
                    "the float32_state_dict of this one there by load_float32_state_dict."
                )

    def show(self, caller: str, index: int, group: Group, step: int) -> Callable[[], None]:
        """Return a function that shows, after a step, the learning rate of that step.

        `step` is the largest count in the group, after its increment.
        """
        if self.schedule is None or self.rate(caller, index, group) is not self.schedule:
            return lambda: None
        rate = rate_of(caller, self.schedule, step - 1)

        def show_rate() -> None:
            group["lr"] = self.shown = rate

        return show_rate


@dataclasses.dataclass
class ReadGroup:
    """A param group at the start of a step.

    Attributes:
        caller: the name in messages.
        index: the index of the group.
        entries: the entries of the group.
        choices: the choices of the group.
        scale: the scale of the gradients, or None without a `GradScaler`.
        rates: the rates of a scheduler given to `read_rates`, or None.
        capturable: whether a CUDA graph may capture its steps.
        tensors: the entries that the step reads on the device, or None if it reads all on the host.
        known: the values of `tensors` when the host read them.
    """

    caller: str
    index: int
    entries: Group
    choices: GroupChoices
    scale: float | None = None
    rates: SchedulerRates | None = None
    capturable: bool = False
    tensors: Group | None = None
    known: Group = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def links(self) -> tuple[Link, ...]:
        """The links of the group's chain, after a link that unscales gradients if needed."""
        links = self.choices.chain.links
        return links if self.scale is None else (UNSCALE, *links)

    @functools.cached_property
    def values(self) -> list[Values]:
        """The checked values of the group's entries, for each link."""
        entries = {**self.entries, **self.known, "grad_scale": self.scale}
        if self.choices.schedule is not None:
            entries["lr"] = self.choices.rate(self.caller, self.index, self.entries)
        if any(hasattr(link.rule, "peak_lr") for link in self.links):
            own = [getattr(link.rule, "peak_lr", None) or 0.0 for link in self.links]
            entries["peak_lr"] = max(self.choices.peak_lr(self.entries, self.known), *own)
            if self.rates is not None and self.choices.schedule is None:
                entries["lr"] = self.rates.of_group(self.index, entries["lr"])
        return [link.read(self.caller, entries) for link in self.links]

    @property
    def knows_rates(self) -> bool:
        """Whether a scheduler has given the rates of the group so far."""
        return self.rates is not None and self.rates.holds

    @functools.cached_property
    def plan_key(self) -> tuple:
        """The values on which plans of the group depend, besides the parameters."""
        read = tuple(link.bind_key(h) for link, h in zip(self.links, self.values, strict=True))
        return self.index, bool(self.entries["maximize"]), tuple(link.seed for link in self.links), read

    def info(self, name: str, param: Tensor) -> ParamInfo:
        """Return the facts that decide how a parameter of the group is stepped."""
        reads_names = any(link.reads_names for link in self.choices.chain.links)
        return ParamInfo(param.dtype, param.shape, name if reads_names else "")

    def touches(self, name: str, param: Tensor) -> tuple[bool, ...]:
        """Return for each link whether it acts on a parameter of the group."""
        known = self.choices.applies
        if name not in known:
            known[name] = tuple(link.touches(name, param) for link in self.choices.chain.links)
        return (True,) * (len(self.links) - len(known[name])) + known[name]

    def plan(self, name: str, param: Tensor) -> Plan:
        """Return the plan of a parameter, shared by parameters of one kind."""
        if self.choices.plans[0] != self.plan_key:
            self.choices.plans = self.plan_key, {}
        plans, kind = self.choices.plans[1], (self.info(name, param), self.touches(name, param))
        if kind not in plans:
            plans[kind] = self._plan(*kind)
        return plans[kind]

    def _plan(self, info: ParamInfo, applies: tuple[bool, ...]) -> Plan:
        rules = bind_rules(self.links, self.caller, self.values, info)
        rules = [rule if applied else None for rule, applied in zip(rules, applies, strict=True)]
        seeds = [link.seed for link in self.links]
        wrapped = self.links[-1].wrapped_links if self.links else 0
        return make_plan(rules, seeds, info.dtype, bool(self.entries["maximize"]), wrapped)


class Owner(Protocol):
    """The attributes of an optimizer that a step reads. Its class is in a layer above."""

    named: ClassVar[Named | None]
    decoupled_decay: ClassVar[bool | None]
    param_groups: list[Group]
    defaults: Group
    nameless_before: int | None
    _tx: ChainByOptions
    _schedule: Callable[[int], Scalar] | None
    _choices: list[GroupChoices]
    _compile: CompileChoice
    _given_names: dict[Tensor, str] | None
    _compared: str | None
    _rates: SchedulerRates | None
    _idle_steps: int

    @property
    def _name(self) -> str: ...
    def _group(self, index: int, saved: Group | None = None) -> ReadGroup: ...
    def _named(self) -> Iterator[tuple[int, str, Tensor]]: ...


def number_of(entries: Group, key: str, index: int | None) -> object:
    """Return a number of an entry, which may have several, or None if there is no such entry."""
    x = entries.get(key)
    return x[index] if index is not None and isinstance(x, (tuple, list)) else x


def is_there(x: object, device: torch.device) -> TypeGuard[Tensor]:
    """Whether a hyperparameter is a tensor on a device, so that a step may read it there."""
    return isinstance(x, Tensor) and x.device == device


def tensors_of(entries: Group, device: torch.device) -> Group:
    """Return the entries that are or contain tensors on a device."""
    return {
        key: x
        for key, x in entries.items()
        if key != "params"
        and (is_there(x, device) or (type(x) is tuple and any(is_there(y, device) for y in x)))
    }


def read_on_device(read: ReadGroup, device: torch.device, before: ReadGroup | None = None) -> ReadGroup:
    """Return a group for a step that reads tensors on their device.

    The host reads their numbers once, for checks, and not again if the group `before` had the same tensors.
    """
    tensors, known = tensors_of(read.entries, device), {}
    for key, x in tensors.items():
        if before is not None and before.tensors and before.tensors.get(key) is x:
            known[key] = before.known[key]
            continue
        several = x if isinstance(x, tuple) else (x,)
        if any(isinstance(y, Tensor) and y.dtype != torch.float32 for y in several):
            raise TypeError(
                f"{read.caller}: {key} of param group {read.index} is no float32 tensor, and a capturable "
                f"step reads it on the device. Write {key}.to(torch.float32) into the group."
            )
        if is_capturing():
            raise RuntimeError(
                f"{read.caller}: {key} of param group {read.index} is a new tensor in a capture. Make a step "
                "outside of the graph before, and write into the tensor that is there."
            )
        known[key] = tuple(map(float, x)) if isinstance(x, tuple) else float(x)
    return dataclasses.replace(read, tensors=tensors, known=known)


def _any_gradient(params: Iterable[Tensor]) -> bool:
    return any(bool(p.grad.any()) for p in params if p.grad is not None)


def rate_of(caller: str, schedule: Callable[[int], Scalar], count: int) -> float:
    """Return the value of a schedule for the step after `count` steps."""
    rate = schedule(count)
    nonnegative(caller, f"lr({count})", rate, "Use a schedule of numbers >= 0.")
    return float(rate)


def plain_value(value: object) -> object:
    """Return a group's value in plain types, for JSON and `torch.load(weights_only=True)`."""
    if isinstance(value, Format):
        return value.description
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        plain = tuple(map(plain_value, value))
        return list(plain) if isinstance(value, list) else plain
    return value


def shown_rates(optimizer: Owner, steps: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
    """Return functions that show, after a step, the rates of groups with a schedule as lr.

    `steps` are pairs (group index, count of one of its parameters after the increment).
    """
    oldest: dict[int, int] = {}
    for i, step in steps:
        oldest[i] = max(oldest.get(i, 0), step)
    caller, groups = optimizer._name, optimizer.param_groups
    return [optimizer._choices[i].show(caller, i, groups[i], oldest[i]) for i in oldest]
