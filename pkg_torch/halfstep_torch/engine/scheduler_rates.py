"""The rates that a scheduler of torch is about to write into param groups (contract A21, A23)."""

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.hyperparameters import Scalar
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.say_once import say_once

_AHEAD = 1 << 10  # steps that a copy makes at once


class SchedulerRates:
    """The coming rates, from a copy of a scheduler that runs ahead with its own groups.

    They are known while the scheduler is stepped once after each step and its rates match the copy's.
    Otherwise it is logged once that they are unknown. The scheduler is not kept alive.

    Attributes:
        holds: whether all steps so far matched the copy.
    """

    def __init__(self, caller: str, scheduler: LRScheduler) -> None:
        self._caller, self._scheduler = caller, weakref.ref(scheduler)
        self.restart()
        self._run_ahead(scheduler)

    def restart(self) -> None:
        """Start again, as after a load."""
        self.holds, self._start, self._rates = True, 0.0, np.zeros((0, 0))
        self._made: dict[int, _Made] = {}

    def of_group(self, index: int, rate: Scalar) -> "RateNow":
        """Return a group's lr, with its current and its coming rates."""
        scheduler = self._scheduler()
        return RateNow(self, index, float(rate), None if scheduler is None else _position(scheduler))

    def coming(self, now: "RateNow", step: int, steps: int) -> np.ndarray | None:
        """Return the float32 rates of a group in the steps after `step`, or None if they are unknown."""
        scheduler = self._scheduler()
        if not self.holds or scheduler is None or now.position is None:
            return None
        made = self._made.setdefault(now.index, _Made(now.position - 1, step - 1, step - 1))
        self.holds = made.is_first(now.position, step)
        if not (self.holds and made.moved_by_one):
            return self._unknown("it is not stepped once after each step")
        if not 0 <= now.position - self._start < len(self._rates) - steps:
            self._run_ahead(scheduler)
        of_group = self._rates[int(now.position - self._start) :, now.index]
        if of_group[0] != now.rate:
            self.holds = False
            return self._unknown(f"{now.rate:.4g} was written where it was to give {of_group[0]:.4g}")
        return of_group[1 : steps + 1].astype(np.float32)

    def _unknown(self, why: str) -> None:
        say_once(
            f"{self._caller}: the scheduler of read_rates does not tell the learning rates that come: {why}. "
            "Step it after each step, and let it alone write lr, or pass lr as a function of the step."
        )

    def _run_ahead(self, scheduler: LRScheduler) -> None:
        """Set the rates of all groups, a row for each coming step. After the last row they stay constant."""
        groups = [_copied(group) for group in scheduler.optimizer.param_groups]
        shadow = torch.optim.SGD([{"params": [torch.zeros(())]} for _ in groups], lr=0.0)
        for own, group in zip(shadow.param_groups, groups, strict=True):
            own.update(group)
        ahead = copy.deepcopy(scheduler, {id(scheduler.optimizer): shadow})
        rows = [[float(group["lr"]) for group in groups]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from an optimizer that is never stepped
            for _ in range(_AHEAD):
                try:
                    ahead.step()
                except ValueError:
                    break
                rows.append([float(group["lr"]) for group in shadow.param_groups])
        rows += rows[-1:] * (_AHEAD + 1 - len(rows))
        self._start, self._rates = _position(scheduler), np.array(rows)


@dataclasses.dataclass(frozen=True)
class RateNow:
    """The rate of a group in a step, in the form of a schedule.

    Attributes:
        source: the source of coming rates.
        index: the index of the group.
        rate: its rate.
        position: the step of the scheduler, or None if it was freed.
    """

    source: SchedulerRates
    index: int
    rate: float
    position: float | None

    def __call__(self, count: int) -> float:
        """Return the rate of this step."""
        return self.rate

    def ahead(self, step: int, steps: int) -> np.ndarray | None:
        """Return the float32 rates of the steps after `step`, or None if they are unknown."""
        return self.source.coming(self, step, steps)


@dataclasses.dataclass
class _Made:
    """The last step of a group.

    Attributes:
        position: the step of the scheduler.
        before: the largest count of a parameter before that position.
        largest: the largest count now.
        moved_by_one: whether the scheduler had moved by one step.
    """

    position: float
    before: int
    largest: int
    moved_by_one: bool = True

    def is_first(self, position: float, step: int) -> bool:
        """Add a parameter's step, given its count. Return whether it is the first at this position."""
        if position != self.position:
            self.moved_by_one = position == self.position + 1
            self.position, self.before = position, self.largest
        self.largest = max(self.largest, step)
        return step <= self.before + 1


def check_scheduler(caller: str, scheduler: object, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a scheduler if its rates depend only on its steps.

    Raises:
        TypeError: if it is not a scheduler of torch, or needs a metric.
        ValueError: if it belongs to another optimizer.
    """
    remedy = "Pass a scheduler of torch.optim.lr_scheduler, or lr as a function of the step."
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"{caller}: {type(scheduler).__name__} is no LRScheduler. {remedy}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            f"{caller}: rates of {type(scheduler).__name__} follow a metric, which is not known ahead. "
            "Leave read_rates out: unknown rates are taken to rise up to the largest."
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{caller}: the {type(scheduler).__name__} writes into another optimizer. Pass one that was "
            "built with this optimizer."
        )
    return scheduler


def _copied(group: Group) -> Group:
    """Return a group's entries without parameters. Tensors are copied, because they are written in place."""
    entries = {key: x for key, x in group.items() if key not in ("params", "param_names")}
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in entries.items()}


def _position(scheduler: LRScheduler) -> float:
    """Return the steps made by a scheduler, or by the first in a chain of schedulers."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    waiting: list[object] = [scheduler.state_dict()]
    while waiting:
        x = waiting.pop()
        if isinstance(x, Mapping):
            if "last_epoch" in x:
                return x["last_epoch"]
            waiting += x.values()
        elif isinstance(x, (list, tuple)):
            waiting += x
    return 0.0
