"""A rule's moments during one step: stored values, and the single rounding to new values."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from halfstep.arrays import Array
from halfstep.numbers import Number, Operand, Origin
from halfstep.op import Op, check_array
from halfstep.rule import Moment, Rule, declared

T = TypeVar("T", bound=Array)
MOST = 4.0
"""Bound on a fed-back error, in roots of the second moment."""
AT_LEAST, PER_STEP = 9.0, 0.25
"""Bound on the factor of a fed-back error, which is 9 or a quarter of the step count."""


class Feedback(NamedTuple):
    """Compensation in one step for the error that storing a moment adds to later updates (contract F19).

    Attributes:
        factor: b / (1 - b) for the moment's rate b, by which all later steps multiply a change in the moment.
            It is at most 9 or a quarter of the step count. Otherwise errors could be longer than the path so
            far.
        second: the second moment with the root that bounds fed-back errors, or None for no bound.
    """

    factor: Array
    second: Any = None  # a StepMoment, this or a framework's

    def apply(self, x: T, stored: T, v: T | None, op: Any) -> T:  # Numbers, or tensors with torch's op
        """Return x - d, with d = factor (stored - x) and |d| at most 4 roots of v, unless v is None."""
        d = self.factor * (stored - x)
        if v is not None:
            most = MOST * op.sqrt(v)
            d = op.clamp(d, -most, most)
        return x - d


def fed_back(rule: Rule) -> dict[str, Moment]:
    """Return the moments with error feedback in a rule, by the names of their factors."""
    moments = declared(type(rule)).moments.values()
    return {
        feedback_name(moment.name): moment
        for moment in moments
        if moment.rounding and getattr(rule, moment.rounding) == "feedback"
    }


def feedback_name(moment: str) -> str:
    """Return the name of a moment's feedback factor among the numbers for a step."""
    return f"{moment}_feedback"


class StepMoment:
    """A moment during one step, as numbers. A framework's subclass rounds in `store`, this class does not.

    Attributes:
        value: the moment stored at the previous step.
        rounded: the moment stored at the current step, or None before `round`.
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
        """Exponent k: an error of one weight gap moves the moment by at most 2^k roots (A21)."""
        return 4

    def inverse_root(self, x: Operand) -> Number:
        """Round x as `round` does, and return about 1/sqrt(x) for the unrounded x (contract F17)."""
        raise NotImplementedError

    def round(self, x: Operand) -> Number:
        """Round x to the format, once, for the new state, and return the values for the update.

        These are the stored values, or with error feedback x minus the error that storing adds to later
        updates. If the second moment gives a unit or a bound for feedback, round the second moment first.
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
        # In units of a root, the stored value is an inexact product.
        made = Origin.ARRAY if self.unit is None else Origin.PRODUCT
        self.rounded = self._op.wrap(self.store(x), made)
        if self.feedback is None:
            return self.rounded
        v = None if self.feedback.second is None else self.feedback.second.rounded
        return self.feedback.apply(self._op.wrap(x), self.rounded, v, self._op)

    def store(self, x: Array) -> Array:
        """Return the stored values for a bare array."""
        return x

    def check_rounded(self) -> None:
        """Raise ValueError if a step did not round the moment."""
        if self.rounded is None:
            raise ValueError(
                f"{self._op.rule}: update never rounds {self.name}, so it would stay zero. "
                f"Call m.{self.name}.round(...) once, or do not declare it."
            )


class StepWeight(StepMoment):
    """The weight during a step, for a rule that rounds weights itself (contract P9)."""

    def bound(self, x: Operand, gaps: int) -> Number:
        """Return the lesser of x and 2^gaps / gap, with the gap between the weight and the next number."""
        return self._op.wrap(self._op.bare(x))


class Moments:
    """An array's moments during one step, as attributes, and `param` if the rule rounds the weight."""

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
