"""A rule for one kind of parameter, as a step runs it: a pure function of tensors.

Hashable, and without a number or a seed, so that equal ones share a compiled kernel.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from halfstep_torch.storage.relative import from_unit, to_unit
from halfstep_torch.storage.state_array import Shape, StateArray, WordSource
from halfstep_torch.storage.stored_moment import Arrays, MomentStorage, Words


class StepMoment:
    """A moment during one step: what was stored, and rounding what is to be.

    Attributes:
        value: the float32 values that the step before stored.
        arrays: the new state arrays, once `round` was called.
        rounded: what `round` returned.
    """

    def __init__(
        self,
        storage: MomentStorage,
        state: Arrays,
        words: Sequence[Words],
        shape: Shape | None,
        unit: "StepMoment | None",
    ):
        self._storage, self._words, self._shape, self._unit = storage, words, shape, unit
        value = storage.decode(state, words)
        value = value if shape is None else value.view(shape)
        self.value = value if unit is None else from_unit(value, unit.value)
        self.arrays: Arrays = {}
        self.rounded: Tensor | None = None

    def round(self, x: Tensor) -> Tensor:
        """Round x to the format, once, for the new state; return what was stored, in float32."""
        v = None if self._unit is None else self._unit.rounded
        z = x if v is None else to_unit(x, v)
        self.arrays, values = self._storage.encode(z if self._shape is None else z.reshape(-1), self._words)
        values = values if self._shape is None else values.view(self._shape)
        self.rounded = values if v is None else from_unit(values, v)
        return self.rounded


class Moments:
    """The moments of a rule during one step, as attributes."""

    def __init__(self, rule: str, moments: Mapping[str, StepMoment]):
        self._rule = rule
        for name, moment in moments.items():  # Dynamo of torch 2.11 cannot trace `__dict__.update`
            setattr(self, name, moment)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._rule}: update reads the moment {name!r}, which the rule does not declare. "
            f"Declare it: {name} = moment()."
        )


@dataclasses.dataclass(frozen=True)
class BoundRule:
    """The update of one kind of parameter by one rule: choices made, numbers not yet known.

    Attributes:
        rule: with its options; numbers, dtypes and seeds are None.
        moments: how each of the rule's moments is stored, in the order of their declaration.
    """

    rule: Any
    moments: tuple[MomentStorage, ...] = ()

    @property
    def scope(self) -> str:
        """What `update` sees, as `Rule.scope` has it."""
        return self.rule.scope

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """State arrays that the rule keeps, by torch's names for them."""
        return {key: array for one in self.moments for key, array in one.arrays.items()}

    @property
    def sources(self) -> tuple[WordSource, ...]:
        """The words that `update` reads, of all moments."""
        return tuple(source for one in self.moments for source in one.sources)

    def update(
        self, u: Tensor, p: Tensor, state: Arrays, numbers: Any, words: Sequence[Words]
    ) -> tuple[Tensor, Arrays]:
        """Return the outgoing update and the rule's new state arrays.

        Args:
            u: incoming update, float32: a stretch of whole blocks; the whole array, in its shape, for a rule
                of scope "parameter".
            p: the weights, float32, in the shape of `u`.
            state: state arrays of all rules, in the shape of `u`, scales in one row; for a rule of scope
                "parameter", all in one row.
            numbers: what `Rule.step_numbers` gave; in compiled code with 0-d tensors for floats.
            words: of each of the `sources`, from a shape to int32 words.
        """
        moments: dict[str, StepMoment] = {}
        drawn, at = {}, 0
        for one in self.moments:
            drawn[one.key] = words[at : at + len(one.sources)]
            at += len(one.sources)
        # Those in units of another after that one.
        for one in sorted(self.moments, key=lambda one: bool(one.unit)):
            shape = None
            if self.scope == "parameter":
                shape_of = one.arrays[one.key].shape_of
                shape = tuple(p.shape) if shape_of is None else tuple(shape_of(tuple(p.shape)))
            unit = moments[one.unit] if one.unit else None
            moments[one.key] = StepMoment(one, state, drawn[one.key], shape, unit)
        u = self.rule.update(u, p, numbers, Moments(self.rule.name, moments))
        return u, {key: array for one in moments.values() for key, array in one.arrays.items()}


@functools.cache
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return the class of named tuples with such fields."""
    return collections.namedtuple(name, fields)


def flat(numbers: Any) -> list[float]:
    """Return the numbers of named tuples, nested or not, in their order."""
    if isinstance(numbers, (tuple, list)):
        return [x for part in numbers for x in flat(part)]
    return [numbers]


def layout(numbers: Any) -> Any:
    """Return the same named tuples with the place of each number in `flat`: equal for equal shapes."""
    places = iter(range(len(flat(numbers))))

    def placed(part: Any) -> Any:
        return _made(part, [placed(x) for x in part]) if isinstance(part, tuple) else next(places)

    return placed(numbers)


def unflat(layout: Any, numbers: Sequence) -> Any:
    """Return named tuples of numbers, given their `layout`."""
    return (
        _made(layout, [unflat(x, numbers) for x in layout]) if isinstance(layout, tuple) else numbers[layout]
    )


def _made(like: tuple, values: list) -> tuple:
    return tuple(values) if type(like) is tuple else type(like)(*values)
