"""The learning rate. Contract: section D."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from halfstep_torch.arguments import check_not_negative
from halfstep_torch.chain import Codes, Link, Words

Schedule = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class LearningRateRule:
    """A product with the learning rate, its sign already flipped."""

    formats = {}
    roles = ()

    def update(
        self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words
    ) -> tuple[Tensor, Codes]:
        """Return (-lr) u, rounded once (contract D2)."""
        (rate,) = numbers
        return rate * u, {}


@dataclasses.dataclass(frozen=True)
class ScaleByLearningRate(Link):
    """The transform that `scale_by_learning_rate` returns."""

    learning_rate: Any = 1e-3
    flip_sign: bool = True

    @property
    def function(self) -> str:
        """The public name."""
        return "scale_by_learning_rate"

    @property
    def entries(self) -> dict[str, Any]:
        """`lr`: a number, a 0-d tensor, or a schedule (which the optimizer keeps outside the groups)."""
        return {"lr": self.learning_rate}

    def check(self, function: str, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Check that the rate is not negative; a schedule is checked when it is read."""
        if not callable(group["lr"]):
            check_not_negative(function, "lr", group["lr"], _way_out("maximize=True to ascend"))

    def rule(self, group: Mapping[str, Any], name: str, param: Tensor) -> LearningRateRule:
        """Return the product."""
        return LearningRateRule()

    def numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        """Return the rate with its sign. A schedule reads the count before its increment (contract A6)."""
        lr = group["lr"]
        if callable(lr):
            lr = np.float32(lr(step - 1))
        rate = check_not_negative(self.function, "lr", lr, _way_out("flip_sign=False to ascend"))
        return (-rate if self.flip_sign else rate,)


def _way_out(ascend: str) -> str:
    return f"Use a number >= 0, or {ascend}."


def scale_by_learning_rate(learning_rate: float | Tensor | Schedule, *, flip_sign: bool = True) -> Link:
    """Multiply the update by minus the learning rate: (-learning_rate) u, rounded once to float32.

    Group entry: `lr`. A schedule is kept outside the groups, so that state dicts hold numbers alone; it excludes
    `torch.optim.lr_scheduler`, which writes `lr` into the groups.

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
        ascend = "flip_sign=False to ascend"
        check_not_negative("scale_by_learning_rate", "learning_rate", learning_rate, _way_out(ascend))
    return ScaleByLearningRate(learning_rate, flip_sign)
