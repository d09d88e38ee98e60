"""The moments of a rule during one step: what was stored, and rounding what is to be, once."""

from collections.abc import Mapping
from typing import Any

from halfstep.numbers import Number
from halfstep.op import Op, check_array


class StepMoment:
    """A moment during one step, as numbers. A framework's own says how `store` rounds; here it does not.

    Attributes:
        value: as the step before stored it.
        rounded: as this step stores it; None before `round`.
    """

    def __init__(self, name: str, value: Any, op: Op, unit: "StepMoment | None" = None):
        """Take the bare array of a moment, and the moment in whose root it is kept."""
        self.name, self.unit, self._op = name, unit, op
        self.value: Number = op.wrap(value)
        self.rounded: Number | None = None

    @property
    def has_inverse_root(self) -> bool:
        """Whether the format is one that rounds by `inverse_root`."""
        return False

    def inverse_root(self, x: Any) -> Number:
        """Round x as `round` does, and return about 1/sqrt(x) of x as it was before (contract F17)."""
        raise NotImplementedError

    def round(self, x: Any) -> Number:
        """Round x to the format, once, for the new state; return what was stored.

        A moment in units of the root of another is rounded after it.
        """
        rule = self._op.rule
        if self.rounded is not None:
            raise ValueError(f"{rule}: {self.name} is rounded twice in a step. Round it once.")
        if self.unit is not None and self.unit.rounded is None:
            unit = self.unit.name
            raise ValueError(
                f"{rule}: {self.name} is kept in units of the root of {unit}. Round {unit} first."
            )
        x = self._op.bare(x)
        check_array(rule, f"what is stored as {self.name}", x, self.value.shape)
        self.rounded = self._op.wrap(self.store(x))
        return self.rounded

    def store(self, x: Any) -> Any:
        """Return the values that are stored for a bare array."""
        return x

    def check_rounded(self) -> None:
        """Refuse a step that left the moment as it was."""
        if self.rounded is None:
            raise ValueError(
                f"{self._op.rule}: update never rounds {self.name}, which so would stay zero. "
                f"Call m.{self.name}.round(...) once, or do not declare it."
            )


class Moments:
    """The moments of one array during one step, as attributes."""

    def __init__(self, rule: str, moments: Mapping[str, Any]):
        self._rule = rule
        for name, moment in moments.items():  # Dynamo of torch 2.11 cannot trace `__dict__.update`
            setattr(self, name, moment)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._rule}: update reads the moment {name}, which the rule does not declare. "
            f'Declare it: {name} = moment(rate="...").'
        )
