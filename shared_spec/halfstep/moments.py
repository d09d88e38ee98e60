"""The moments of a rule during one step: stored values, and the single rounding of new ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from halfstep.arrays import Array
from halfstep.numbers import Number, Operand, Origin
from halfstep.op import Op, check_array
from halfstep.rule import Moment, Rule, declared

T = TypeVar("T", bound=Array)
MOST = 4.0
"""How many roots of the second moment are fed back at most: an update moves by no more than that."""
AT_LEAST, PER_STEP = 9.0, 0.25
"""How many errors of storing a moment a step takes back at most: 9, or a quarter of its count."""


class Feedback(NamedTuple):
    """How a step takes back the error that storing a moment adds to later updates (contract F19).

    Attributes:
        factor: b / (1 - b), b the moment's rate: how often a change of it comes back in all later steps. At
            most 9 or a quarter of the count of steps: errors would else be longer than the way so far.
        second: the second moment with the root that bounds fed-back errors; None for no bound.
    """

    factor: Array
    second: Any = None  # a StepMoment, this or a framework's

    def apply(self, x: T, stored: T, v: T | None, op: Any) -> T:  # Numbers, or tensors with torch's op
        """Return x - d, d = factor (stored - x), |d| at most 4 roots of v; None for no bound."""
        d = self.factor * (stored - x)
        if v is not None:
            most = MOST * op.sqrt(v)
            d = op.clamp(d, -most, most)
        return x - d


def fed_back(rule: Rule) -> dict[str, Moment]:
    """Return the moments with errors that a rule feeds back, by the names of their factors."""
    moments = declared(type(rule)).moments.values()
    return {
        feedback_name(moment.name): moment
        for moment in moments
        if moment.rounding and getattr(rule, moment.rounding) == "feedback"
    }


def feedback_name(moment: str) -> str:
    """Return the name of the factor of a moment's feedback among the numbers of a step."""
    return f"{moment}_feedback"


class StepMoment:
    """A moment during one step, as numbers. A framework's own says how `store` rounds; here it does not.

    Attributes:
        value: as the step before stored it.
        rounded: as this step stores it; None before `round`.
    """

    def __init__(
        self,
        name: str,
        value: Array,
        op: Op,
        unit: "StepMoment | None" = None,
        feedback: Feedback | None = None,
    ):
        """Take a moment's array, the moment that gives its unit, and its error feedback."""
        self.name, self.unit, self.feedback, self._op = name, unit, feedback, op
        self.value: Number = op.wrap(value)
        self.rounded: Number | None = None

    @property
    def has_inverse_root(self) -> bool:
        """Whether the format rounds by `inverse_root`."""
        return False

    @property
    def room(self) -> int:
        """The power of two of roots by which an error of one gap of a weight moves it at most (A21)."""
        return 4

    def inverse_root(self, x: Operand) -> Number:
        """Round x as `round` does, and return about 1/sqrt(x) of x as it was before (contract F17)."""
        raise NotImplementedError

    def round(self, x: Operand) -> Number:
        """Round x to the format, once, for the new state; return the values for the update.

        These are the stored values, or with error feedback x minus the error that storing adds to later
        updates. A moment in units of the root of another, or with error feedback, is rounded after that.
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
        # In units of a root the stored value is a product, which is not exact.
        made = Origin.ARRAY if self.unit is None else Origin.PRODUCT
        self.rounded = self._op.wrap(self.store(x), made)
        if self.feedback is None:
            return self.rounded
        v = None if self.feedback.second is None else self.feedback.second.rounded
        return self.feedback.apply(self._op.wrap(x), self.rounded, v, self._op)

    def store(self, x: Array) -> Array:
        """Return the values that are stored for a bare array."""
        return x

    def check_rounded(self) -> None:
        """Refuse a step that left the moment as it was."""
        if self.rounded is None:
            raise ValueError(
                f"{self._op.rule}: update never rounds {self.name}, so it would stay zero. "
                f"Call m.{self.name}.round(...) once, or do not declare it."
            )


class StepWeight(StepMoment):
    """The weight during a step of a rule that rounds it itself (contract P9)."""

    def bound(self, x: Operand, gaps: int) -> Number:
        """Return x, or 2^gaps over the gap between the weight and the next number where this is less."""
        return self._op.wrap(self._op.bare(x))


class Moments:
    """The moments of one array during one step, as attributes, and `param` where a rule rounds the weight."""

    param: StepWeight

    def __init__(self, rule: str, moments: Mapping[str, object]):
        self._rule = rule
        self.__dict__.update(moments)

    def __getattr__(self, name: str) -> StepMoment:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._rule}: update reads the moment {name}, which the rule does not declare. "
            f'Declare it: {name} = moment(rate="...").'
        )
