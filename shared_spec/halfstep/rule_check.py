"""Comparison of a rule with NumPy, operation by operation, for `check_rule` in both packages.

A framework takes one step on the numbers that `Question` draws, operation by operation, and once more
compiled. `compared` takes the same step in NumPy. If a result differs, it raises an error with the line of
`update` that computes it.
"""

import linecache
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from halfstep.arrays import Array
from halfstep.hyperparameters import Values
from halfstep.moments import StepMoment
from halfstep.numbers import Mask, Number, Operand, Origin
from halfstep.op import Op
from halfstep.rule import Rule, moments_of
from halfstep.step import updated

T = TypeVar("T")
COUNT = 3
"""Number of steps, including the checked step."""
_SHAPE = (32, 64)
# Fourth powers stay normal float32 numbers. Subnormal numbers are a matter of contract A8.
_BINADES = 28
_NORMAL = np.float32(2.0**-100)


class Question(NamedTuple):
    """The float32 arrays that a step reads.

    Attributes:
        g: the incoming update, a tuple of arrays if the rule has the scope "all".
        p: the weights, a tuple likewise, or None if the rule does not read them.
        moments: the moments stored at the previous step, by name.
    """

    g: Array
    p: Array
    moments: dict[str, Array]

    @classmethod
    def of(cls, rule: Rule, seed: int) -> "Question":
        """Draw numbers from 57 binades with either sign, and zeros of both signs."""
        rng = np.random.default_rng(seed)

        def drawn(shape: tuple[int, ...]) -> np.ndarray:
            x = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-_BINADES, _BINADES + 1, shape)
            x = x * rng.choice([-1.0, 1.0], shape)
            return np.where(rng.random(shape) < 1 / 16, np.copysign(0.0, x), x).astype(np.float32)

        several = rule.scope == "all"
        g = (drawn(_SHAPE), drawn(_SHAPE[1:])) if several else drawn(_SHAPE)
        p = (drawn(_SHAPE), drawn(_SHAPE[1:])) if several else drawn(_SHAPE)
        moments = {}
        for name, moment in moments_of(rule).items():
            x = drawn(_SHAPE if moment.shape is None else moment.shape(_SHAPE))
            moments[name] = x if moment.signed else np.abs(x)
        return cls(g, p if rule.reads_params else None, moments)


class Answer(NamedTuple):
    """The results of a step, as the framework's arrays.

    Attributes:
        outputs: the update, or updates, and the new moments.
        results: the result of every operation, in order.
        places: the line of `update` for every operation.
        loose: results that the framework rounds in its own way, from `apply`, `norm`, `matmul` and `power`.
    """

    outputs: tuple
    results: list
    places: list[str]
    loose: list


class Recorded(Op):
    """Operations that record their results, a base class in front of a framework's `Op`."""

    def __init__(self, *arguments: Any, **options: Any):  # arguments of the framework's class
        super().__init__(*arguments, **options)
        self.results, self.places, self.loose = [], [], []

    def wrap(self, x: Array, made: Origin = Origin.ARRAY) -> Number:
        """Return a Number, and record the array."""
        if (place := _line()) is not None:
            self.results.append(x)
            self.places.append(place)
        return super().wrap(x, made)

    def apply(self, function: Callable[..., Array], *xs: Operand | Mask) -> Array:
        """Return and record the framework's result."""
        return self._kept(super().apply(function, *xs))

    def norm(self, x: Operand, exact: bool = False) -> Number:
        """Return and record the framework's result."""
        return self._kept(super().norm(x, exact))

    def norm_in_range(self, x: Operand, exact: bool = False) -> tuple[Number, Number]:
        """Return and record the framework's result."""
        return tuple(map(self._kept, super().norm_in_range(x, exact)))  # pyright: ignore[reportReturnType]

    def matmul(self, x: Operand, y: Operand) -> Number:
        """Return and record the framework's result."""
        return self._kept(super().matmul(x, y))

    def power(self, x: Operand, y: Operand) -> Number:
        """Return and record the framework's result."""
        return self._kept(super().power(x, y))

    def _kept(self, x: T) -> T:
        self.loose.append(x)
        return x


def answer(rule: Rule, question: Question, numbers: Values, op: Recorded) -> Answer:
    """Take a rule's step with a `Recorded` op and float32 moments."""
    moments = {name: StepMoment(name, x, op) for name, x in question.moments.items()}
    u = updated(rule, numbers, question.g, question.p, op, moments)
    rounded = [op.bare(moment.rounded) for moment in moments.values()]
    return Answer((u, *rounded), op.results, op.places, op.loose)


class NumpyOp(Recorded):
    """Operations in NumPy. Loose results are copied from the framework."""

    framework = np

    def __init__(self, rule: str, loose: Sequence):
        super().__init__(rule)
        self._given = iter(loose)

    def root(self, x: np.ndarray) -> np.ndarray:
        """Return the root of x."""
        return np.sqrt(x)

    def quotient(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return x / y."""
        return np.divide(x, y)

    def as_scalar(self, x: object) -> np.float32 | None:
        """Return a number as float32."""
        return np.float32(x) if isinstance(x, (int, float, np.number)) else None

    def ema(self, average: Operand, value: Operand, rate: Operand) -> Number:
        """Return (rate average) + ((1 - rate) value)."""
        average, value, rate = (self.number(x).value for x in (average, value, rate))
        return self.wrap(rate * average + (np.float32(1) - rate) * value)

    def apply(self, function: Callable[..., Array], *xs: Operand | Mask) -> Array:
        """Return the framework's result."""
        return self._next()

    def norm(self, x: Operand, exact: bool = False) -> Number:
        """Return the framework's result."""
        return self._next()

    def norm_in_range(self, x: Operand, exact: bool = False) -> tuple[Number, Number]:
        """Return the framework's result."""
        return self._next(), self._next()

    def matmul(self, x: Operand, y: Operand) -> Number:
        """Return the framework's result."""
        return self._next()

    def power(self, x: Operand, y: Operand) -> Number:
        """Return the framework's result."""
        return self._next()

    def _next(self) -> Any:  # the framework's result: a Number, a Mask, or a tuple
        def here(given: Number | Mask) -> Number | Mask:
            x = np.asarray(given.value)
            return Mask(x, self) if x.dtype == bool else self.wrap(x)

        given = next(self._given)
        return tuple(map(here, given)) if isinstance(given, tuple) else here(given)


def compared(rule: Rule, question: Question, numbers: Values, eager: Answer, compiled: Mapping[str, Answer]):
    """Compare a framework's answers with NumPy's, and the answers of compiled steps with the eager answer.

    `compiled` maps a way of compiling to an answer, which may have only outputs. The error names the line of
    `update` that computes the different result.
    """
    with np.errstate(all="ignore"):
        ours = answer(
            rule, question, type(numbers)(*map(np.float32, numbers)), NumpyOp(rule.name, eager.loose)
        )
        normal = _normal(ours.results)
    _compare(rule, eager, ours, normal, "from NumPy's")
    for how, theirs in compiled.items():
        _compare(rule, theirs, eager, normal, f"{how} from operations taken one by one")


def _compare(rule: Rule, theirs: Answer, ours: Answer, normal: Mapping[tuple, np.ndarray], what: str) -> None:
    pairs = [*zip(theirs.results, ours.results, ours.places, strict=False)]
    outputs = [
        (x, y, "what update returns or stores")
        for x, y in zip(_flat(theirs.outputs), _flat(ours.outputs), strict=True)
    ]
    for x, y, place in (*pairs, *outputs):
        x, y = np.asarray(x), np.asarray(y)
        differs = (x.view(np.int32) != y.view(np.int32)) & ~(np.isnan(x) & np.isnan(y))
        differs &= normal.get(y.shape, np.True_)
        if count := int(np.count_nonzero(differs)):
            at = tuple(int(i[0]) for i in np.nonzero(differs))
            raise ValueError(
                f"{rule.name}: {place}: the result differs {what} in {count} of {y.size} numbers, such as "
                f"{x[at]!r} for {y[at]!r}."
            )


def _flat(x: object) -> list:
    return [leaf for part in x for leaf in _flat(part)] if isinstance(x, tuple) else [x]


def _normal(results: Sequence[np.ndarray]) -> dict[tuple, np.ndarray]:
    """Return by shape where all results are 0 or far from subnormal. Elsewhere frameworks may differ (A8)."""
    normal: dict[tuple, np.ndarray] = {}
    for x in results:
        ordinary = (x == 0) | ~(np.abs(x) < _NORMAL)
        normal[np.shape(x)] = normal.get(np.shape(x), np.True_) & ordinary
    return normal


def _line() -> str | None:
    """Return the line of `update` that calls an operation, or None outside `update`."""
    frame = sys._getframe(2)
    inside = ("halfstep.", "halfstep_jax.", "halfstep_torch.")
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(inside) or module.startswith("halfstep.rules."):
            break
        if frame.f_code in (updated.__code__, answer.__code__):
            return None
        frame = frame.f_back
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{pathlib.Path(file).name}, line {line}: {linecache.getline(file, line).strip()}"
