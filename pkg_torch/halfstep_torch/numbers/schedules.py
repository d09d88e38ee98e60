"""Hyperparameters that may be functions of the step, such as a group's learning rate. Contract: A6."""

import dataclasses
from collections.abc import Callable

import numpy as np

from halfstep.hyperparameters import Scalar
from halfstep_torch.numbers.hyperparameters import nonnegative

_KEPT = 1 << 10


@dataclasses.dataclass
class Schedule:
    """A function of the count, with its cached numbers for coming counts.

    Attributes:
        function: a function from a step count to a number.
    """

    function: Callable[[int], Scalar]
    _coming: dict[int, float] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __call__(self, count: int) -> float:
        """Return the number at a count of steps."""
        return self.function(count)

    def ahead(self, count: int, steps: int) -> np.ndarray:
        """Return the float32 numbers at `count` and later counts. After the end the last number is repeated.

        Each count is computed once, unless the function's number at `count` has changed.
        """
        coming = self._coming if self._coming.get(count) == self._number(count) else {}
        last = self._number(count - 1) or 0.0
        for k in range(count, count + steps):
            if k not in coming and (number := self._number(k)) is not None:
                last = number
            last = coming.setdefault(k, last)
        now = {k: coming[k] for k in range(count, count + steps)}
        self._coming = coming if len(coming) < _KEPT else now
        return np.array(list(now.values()), np.float32)

    def _number(self, count: int) -> float | None:
        """Return the number at a count, or None if there is none, as past the end of a list."""
        try:
            return float(self.function(count))
        except Exception:
            return None


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A hyperparameter with a schedule, `rate`, checked whenever it is read."""

    caller: str
    name: str
    rate: Callable[[int], float]

    def at(self, step: int) -> float:
        """Return the number of a step. A schedule reads the count before its increment (contract A6)."""
        name, value = f"{self.name}({step - 1})", self.rate(step - 1)
        return nonnegative(self.caller, name, value, "Use a schedule of numbers >= 0.")

    def ahead(self, step: int, steps: int) -> np.ndarray | None:
        """Return the float32 numbers of the steps after `step`, or None if they are unknown."""
        ahead = getattr(self.rate, "ahead", None) or Schedule(self.rate).ahead
        return ahead(step, steps)
