"""The learning rate. Contract: section D."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.hyperparameters import nonnegative
from halfstep_torch.numbers.random_words import Role

Schedule = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class LearningRateRule:
    """A product with the learning rate, its sign already flipped."""

    arrays: ClassVar[Mapping[str, StateArray]] = {}
    roles: ClassVar[tuple[Role, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = ("rate",)

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return (-lr) u, rounded once (contract D2)."""
        (rate,) = numbers
        return rate * u, {}


@dataclasses.dataclass(frozen=True)
class ScaleByLearningRate(Link):
    """The transform that `scale_by_learning_rate` returns; its arguments, unchecked."""

    function: ClassVar[str] = "scale_by_learning_rate"
    learning_rate: Any
    flip_sign: bool = True

    @property
    def entries(self) -> dict[str, Any]:
        """`lr`: a number, a 0-d tensor, or a schedule (which `Optimizer` keeps outside the groups)."""
        return {"lr": self.learning_rate}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return (lr,), a number or a schedule."""
        return (read_rate(function, group),)

    def rule(self, function: str, values: tuple, weights: Weights) -> LearningRateRule:
        """Return the product."""
        return LearningRateRule()

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return the rate with its sign."""
        lr = rate_at(function, values[0], step)
        return (-lr if self.flip_sign else lr,)


def read_rate(function: str, group: Mapping[str, Any]) -> Any:
    """Return the entry `lr` of a param group, checked: a float32 number, or a schedule."""
    lr = group["lr"]
    if callable(lr):
        return lr
    return nonnegative(function, "lr", lr, "Use a number >= 0, or maximize=True to ascend.")


def rate_at(function: str, lr: float | Schedule, step: int) -> float:
    """Return the rate of a step. A schedule reads the count before its increment (contract A6)."""
    if not callable(lr):
        return lr
    return nonnegative(function, f"lr({step - 1})", lr(step - 1), "Use a schedule of numbers >= 0.")


class ScheduledGroup(dict):
    """A param group whose lr is a function of the step."""

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise KeyError(
                "lr: it is a function of the step here, kept outside the param groups, and lr schedulers "
                "write into them. Pass lr as a number to use one."
            )
        raise KeyError(key)


def scale_by_learning_rate(learning_rate: float | Tensor | Schedule, *, flip_sign: bool = True) -> Link:
    """Multiply the update by minus the learning rate: (-learning_rate) u, rounded once to float32.

    Group entry: `lr`. A schedule is kept outside the groups, so that state dicts hold numbers alone; it
    excludes `torch.optim.lr_scheduler`, which writes `lr` into the groups.

    Args:
        learning_rate: a number, a float32 tensor of one element (read at every step), or a function from the
            parameter's count of steps so far (0 at the first) to a number.
        flip_sign: True to descend.

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is negative.

    Example:
        >>> scale_by_learning_rate(1e-3).entries
        {'lr': 0.001}

    Source: contract D2.
    """
    if not callable(learning_rate):
        way_out = "Use a number >= 0, or flip_sign=False to ascend."
        nonnegative("scale_by_learning_rate", "learning_rate", learning_rate, way_out)
    return ScaleByLearningRate(learning_rate, flip_sign)
