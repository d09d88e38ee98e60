"""Hyperparameters that may be functions of the step: of a param group, its learning rate. Contract: A6."""

import dataclasses
from collections.abc import Callable

from halfstep_torch.numbers.hyperparameters import nonnegative

Schedule = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A hyperparameter that follows a schedule, `rate`, checked whenever it is read."""

    caller: str
    name: str
    rate: Schedule

    def at(self, step: int) -> float:
        """Return the number of a step. A schedule reads the count before its increment (contract A6)."""
        name, value = f"{self.name}({step - 1})", self.rate(step - 1)
        return nonnegative(self.caller, name, value, "Use a schedule of numbers >= 0.")
