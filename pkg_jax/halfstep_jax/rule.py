"""What an update rule is: its hyperparameters and moments, declared once, and the arithmetic of one leaf.

A rule is a frozen dataclass. It knows neither trees nor formats nor random words; `transform.py` makes an
Optax transform of one.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
import optax

from halfstep_jax.numbers.exact import straight_through
from halfstep_jax.numbers.hyperparameters import as_decay_rate, as_nonnegative
from halfstep_jax.numbers.random_words import LeafKey
from halfstep_jax.numbers.schedules import as_scalar_or_schedule, at_count
from halfstep_jax.storage.relative import from_unit, to_unit
from halfstep_jax.storage.stored_moment import MomentField, StoredMoment

Scope = Literal["elementwise", "parameter", "all"]


def decay_rate(default: Any = dataclasses.MISSING) -> Any:
    """Declare a hyperparameter in [0, 1): float32 from then on, and a number of the step."""
    return dataclasses.field(default=default, metadata={"check": as_decay_rate})


def number(default: Any = dataclasses.MISSING, *, check: Callable[..., Any] = as_nonnegative) -> Any:
    """Declare a hyperparameter: float32 from then on, and a number of the step.

    Args:
        default: of the field.
        check: from (caller, name, value) to the float32 number; raises for a value that is wrong. Not
            negative, unless given.
    """
    return dataclasses.field(default=default, metadata={"check": check})


def scalar_or_schedule(default: Any = dataclasses.MISSING, hint: str = "Use a number >= 0.") -> Any:
    """Declare a hyperparameter >= 0, or a schedule of the count before its increment."""
    check = functools.partial(as_scalar_or_schedule, hint=hint)
    return dataclasses.field(default=default, metadata={"check": check})


def moment(
    *,
    rate: str = "",
    signed: bool = True,
    dtype: str = "",
    rounding: str = "",
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None,
    unit: str = "",
) -> Any:
    """Declare a moment: an array of state that is kept in a format and rounded once a step.

    Its name is that of the attribute, as which it stands in the state, and decides which words round it.

    Args:
        rate: the field that holds its decay rate: a rounding to nearest that would freeze it is refused.
        signed: False for a second moment: never negative, and what is not zero is not stored as zero.
        dtype: the field that says how it is stored; its name and "_dtype" unless given. A rule without such
            a field keeps the moment in bfloat16 for bfloat16 weights, else in float32.
        rounding: the field that says how it is rounded; its name and "_rounding" unless given, and "auto"
            without.
        shape: from the shape of a weight to its own; None: the same.
        unit: the second moment, in whose root it may be kept: such a one can be asked for as `relative(...)`,
            and `update` rounds the second moment first. Both are averages of powers of the same numbers.
    """
    return MomentField(rate, signed, dtype, rounding, shape, unit)


class StepKeys(NamedTuple):
    """What a leaf's moments are rounded with in a step.

    Attributes:
        now: the leaf's key.
        before: that of the step before, where codes are dithered; None elsewhere.
        zero: for `exact.opaque`.
    """

    now: LeafKey
    before: LeafKey | None
    zero: jax.Array


class StepMoment:
    """One moment of one leaf during one step.

    Attributes:
        value: float32, as it was stored at the step before.
        encoded: what is stored now.
    """

    def __init__(self, caller: str, stored: StoredMoment, encoded, keys: StepKeys, unit: "StepMoment | None"):
        self._caller, self._stored, self._keys = caller, stored, keys
        self._unit = unit if stored.format_of(encoded).relative else None
        self._rounded: jax.Array | None = None
        self.encoded = encoded
        self.value = stored.decode(encoded, keys.before)
        if self._unit is not None:
            self.value = from_unit(self.value, self._unit.value)

    def round(self, x: jax.Array) -> jax.Array:
        """Round float32 `x` to the format, once, keep it for the new state, and return what was stored.

        Raises:
            ValueError: if it is of another shape or dtype than the moment, or rounded twice, or kept in units
                of the root of a moment that was not rounded yet.
        """
        name = self._stored.name
        if self._rounded is not None:
            raise ValueError(f"{self._caller}: {name} is rounded twice in a step. Round it once.")
        check_array(self._caller, f"what is stored as {name}", x, self.value.shape)
        v = None if self._unit is None else self._unit.rounded_before(name)
        z = x if v is None else to_unit(x, v, self._keys.zero)
        self.encoded, z = self._stored.round_trip(self.encoded, z, self._keys.now)
        self._rounded = straight_through(x, z if v is None else from_unit(z, v))
        return self._rounded

    def rounded_before(self, name: str) -> jax.Array:
        """Return what was stored in this step, in whose root the moment `name` is kept.

        Raises:
            ValueError: if it was not rounded yet.
        """
        if self._rounded is None:
            own = self._stored.name
            raise ValueError(
                f"{self._caller}: {name} is kept in units of the root of {own}. Round {own} first."
            )
        return self._rounded

    def check_rounded(self) -> None:
        """Refuse a step that left the moment as it was.

        Raises:
            ValueError: if `round` was not called.
        """
        if self._rounded is None:
            name = self._stored.name
            raise ValueError(
                f"{self._caller}: update never rounds {name}, which so would stay zero. "
                f"Call moments.{name}.round(...) once, or do not declare it."
            )


class Moments:
    """The moments of one leaf during one step, as attributes."""

    def __init__(self, caller: str, moments: dict[str, StepMoment]):
        self._caller = caller
        self.__dict__.update(moments)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._caller}: update reads the moment {name}, which the rule does not declare. "
            f'Declare it: {name} = moment(rate="...").'
        )


class Rule:
    """Base of update rules: subclass it as a frozen dataclass, and give the rule to `as_transform`.

    Fields declared by `number`, `decay_rate` and `scalar_or_schedule` are checked, made float32 and passed to
    `update` as numbers; other fields are options, which stay as they are. Moments are attributes declared by
    `moment`, without an annotation. A field `seed`, if there is one, seeds the random words.

    Attributes:
        name: of the transform, for errors; by default that of the class.
        scope: "elementwise"; "parameter", where an element's update reads others of its array; or "all",
            where it reads other arrays (`update` then gets and returns tuples, and there are no moments).
        reads_params: what the weights are read for, as the error says that meets a missing `params`; "" if
            they are not read.
        State: the NamedTuple of the state; derived, where there are moments, if the class does not say.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope] = "elementwise"
    reads_params: ClassVar[str] = ""
    State: ClassVar[Any]
    seed: Any = 0

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name", cls.__name__)
        if "State" not in vars(cls):
            names = list(cls.moment_fields())
            names += [f"{name}_scale" for name in names]
            nothing = [optax.EmptyState()] * (len(names) // 2)
            cls.State = collections.namedtuple(
                "State", ("count", "seed", *names), defaults=nothing, module=cls.__module__, rename=True
            )
            cls.State.__qualname__ = f"{cls.__qualname__}.State"  # pickle looks there

    def __post_init__(self):
        for name, check in _checks(type(self)).items():
            object.__setattr__(self, name, check(self.name, name, getattr(self, name)))

    @classmethod
    def moment_fields(cls) -> dict[str, MomentField]:
        """Return the declared moments by name."""
        found = (vars(base).items() for base in reversed(cls.__mro__))
        return {name: field for items in found for name, field in items if isinstance(field, MomentField)}

    def numbers(self, h, count) -> Mapping[str, Any]:
        """Return numbers of a step that `update` reads beside the hyperparameters, or in place of some.

        Args:
            h: the hyperparameters in float32, by name, schedules read.
            count: int32 scalar, this step counted; None where a rule has neither moments nor a schedule.
        """
        return {}

    def update(self, g, p, n, moments, zero) -> Any:
        """Return the update of one leaf, and round every moment on the way.

        All in float32, and protected: a product that feeds a sum goes through `exact.add_product`, one that
        is returned through `exact.opaque`, else a compiler changes its rounding.

        Args:
            g: the incoming update.
            p: the weight; None where `reads_params` is "".
            n: the numbers of the step.
            moments: of this leaf: `moments.mu.value`, `moments.mu.round(x)`.
            zero: for `exact.opaque`.
        """
        raise NotImplementedError


@functools.cache
def _checks(rule: type[Rule]) -> dict[str, Callable[..., Any]]:
    """Return the checks of the declared hyperparameters, by name."""
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(rule)  # pyright: ignore[reportArgumentType]
    return {field.name: field.metadata["check"] for field in fields if "check" in field.metadata}


@functools.cache
def _named(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Numbers", names)


def schedules(rule: Rule) -> list[str]:
    """Return the names of the hyperparameters that follow a schedule."""
    return [name for name in _checks(type(rule)) if callable(getattr(rule, name))]


def numbers_at(rule: Rule, before, count, **fixed) -> Any:
    """Return the numbers of a step, given the count before it and its own, and values of some of them."""
    given = {name: getattr(rule, name) for name in _checks(type(rule))} | fixed
    h = {name: at_count(rule.name, name, value, before) for name, value in given.items()}
    n = h | dict(rule.numbers(_named(tuple(h))(**h), count))
    return _named(tuple(n))(**n)


def static_form(rule: Rule) -> Rule:
    """Return the rule with constants alone: hashable, so that leaves share what is traced of it."""
    form = object.__new__(type(rule))
    for name, value in vars(rule).items():
        known = name not in _checks(type(rule)) or isinstance(value, np.floating)
        if name != "seed":
            object.__setattr__(form, name, value if known else _InNumbers(name))
    return form


@dataclasses.dataclass(frozen=True)
class _InNumbers:
    """Stands where `update` finds no constant but a number of the step."""

    name: str

    def __repr__(self) -> str:
        return f"<read n.{self.name}>"


def check_array(caller: str, what: str, x, shape: tuple[int, ...]) -> None:
    """Refuse what is not a float32 array of `shape`.

    Raises:
        ValueError: naming it.
    """
    found = getattr(x, "shape", None), str(getattr(x, "dtype", type(x).__name__))
    if found != (shape, "float32"):
        raise ValueError(
            f"{caller}: {what} is {found[1]}{list(found[0] or ())}, due is float32{list(shape)}. "
            "Return float32 of the shape that came in."
        )
