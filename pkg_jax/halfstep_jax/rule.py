"""How JAX reads a `halfstep.Rule`: its hyperparameters in float32, its moments in a step, and its state.

Nothing here knows trees or formats; `transform.py` makes an Optax transform of a rule.
"""

import collections
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from halfstep.arrays import Array
from halfstep.float_formats import FLOAT_FORMATS
from halfstep.hyperparameters import Scalar, Values
from halfstep.moments import AT_LEAST, PER_STEP, Feedback, StepMoment, StepWeight, fed_back, feedback_name
from halfstep.numbers import Number, ReadFromNumbers
from halfstep.op import check_array
from halfstep.random_words import Role
from halfstep.rule import Rule, declared
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import room_for_errors
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.numbers.hyperparameters import as_number, check_order
from halfstep_jax.numbers.op import Count, JaxOp
from halfstep_jax.numbers.random_words import LeafKey
from halfstep_jax.numbers.roots import divide
from halfstep_jax.numbers.rounding import round_in_float32
from halfstep_jax.numbers.schedules import at_count, coming
from halfstep_jax.storage.formats import Encoded
from halfstep_jax.storage.relative import into_unit, out_of_unit
from halfstep_jax.storage.stored_moment import StoredMoment
from halfstep_jax.xla.exact import straight_through, without_derivative

S = TypeVar("S", bound=type)
_PUBLISHED: dict[type[Rule], type] = {}


class StepKeys(NamedTuple):
    """The key of a leaf now and, for dithered codes, before, and a zero for `exact.opaque`."""

    now: LeafKey
    before: LeafKey | None
    zero: jax.Array


class StoredStepMoment(StepMoment):
    """A moment of one leaf during one step, that rounds to its format.

    Attributes:
        old: what the step before stored.
        encoded: what is stored now, as others read it.
        made: the same, as this moment makes it: of a step in passes, which makes it in an earlier one.
    """

    def __init__(
        self,
        stored: StoredMoment,
        encoded: Tree,
        keys: StepKeys,
        op: JaxOp,
        numbers: Values,
        second: "StoredStepMoment | None",
        new: Encoded | None,
    ):
        self._new = new
        self._format = stored.format_of(encoded)
        unit = second if self._format.relative else None
        value = stored.decode(encoded, keys.before)
        if unit is not None:
            value = out_of_unit(self._format, value, unit.value.value, unit.old)
        feedback = None
        if numbers is not None and stored.feeds_back(self._format):
            feedback = Feedback(op.number(getattr(numbers, feedback_name(stored.name))), second)
        super().__init__(stored.name, value, op, unit, feedback)
        self._stored, self._keys, self._nu = stored, keys, unit
        self.old = self.encoded = self.made = encoded

    @property
    def has_inverse_root(self) -> bool:
        """Whether the format rounds by `inverse_root`."""
        return self._format.has_inverse_root

    @property
    def room(self) -> int:
        """What `room_for_errors` says of the format."""
        return room_for_errors(self._format)

    def inverse_root(self, x: Array) -> Number:
        """Round x for the new state; return about 1/sqrt(x) of the unrounded x."""
        x = self._op.bare(x)
        check_array(self._op.rule, f"what is stored as {self.name}", x, self.value.shape)
        codes_of = without_derivative(x)
        self.encoded, inverse = self._stored.round_with_inverse_root(self.encoded, codes_of, self._keys.now)
        self.rounded = self._op.wrap(straight_through(x, self._stored.decode(self.encoded, None)))
        return self._op.wrap(inverse)

    def round_array(self, x: jax.Array) -> None:
        """Round an array that no rule computed."""
        self.round(self._op.wrap(x))

    def store(self, x: jax.Array) -> jax.Array:
        """Round to the format, keep the codes, and return the values that they hold."""
        nu, fmt = self._nu, self._format
        if nu is None or nu.rounded is None:
            return straight_through(x, self._round_trip(x))
        v = nu.rounded.value
        # Where what is stored is known, XLA drops the way into the unit.
        z = self._round_trip(into_unit(fmt, x, v, nu.encoded, self._keys.zero))
        return straight_through(x, out_of_unit(fmt, z, v, nu.encoded))

    def _round_trip(self, x: jax.Array) -> jax.Array:
        """Return the stored value of x."""
        stored, fmt, key, new = self._stored, self._format, self._keys.now, self._new
        x = without_derivative(x) if fmt.ends_derivatives else x
        if new is None:
            self.encoded, value = stored.round_trip(self.encoded, x, key)
            return value
        scale = fmt.scale_of(x) if fmt.scaled else None
        words = stored.words(fmt, x.shape, key)
        codes = fmt.codes_of(x, words, new.scale, keep_nonzero=stored.keep_nonzero).codes
        self.encoded, self.made = new, Encoded(codes, scale)
        return stored.decode(new, key)


class RoundedWeight(StepWeight):
    """A weight of one leaf during one step of a rule that rounds it: to its own dtype, stochastically."""

    def __init__(self, p: jax.Array, dtype: DType, key: LeafKey, op: JaxOp):
        super().__init__("param", p, op)
        self._dtype, self._key = jnp.dtype(dtype).name, key

    def store(self, x: jax.Array) -> jax.Array:
        """Return x rounded to the dtype of the weight, in float32."""
        if self._dtype == "float32":
            return x
        return round_in_float32(x, self._dtype, self._key.words(Role.PARAM, x.shape), quiet=True)

    def bound(self, x: Array, gaps: int) -> Number:
        """Return x, or 2^gaps over the gap at the weight where this is less."""
        x = self._op.bare(x)
        if self._dtype == "float32":
            return self._op.wrap(jnp.broadcast_to(x, self.value.shape))
        n, lowest = FLOAT_FORMATS[self._dtype].gap_exponents(gaps)
        exponents = lax.bitcast_convert_type(self._op.bare(self.value), jnp.uint32) & np.uint32(0x7F800000)
        if n - lowest < 254:
            exponents = jnp.maximum(exponents, np.uint32(lowest << 23))
        # Positive floats have the order of their patterns, and what is past 2^127 has a larger one.
        x = lax.bitcast_convert_type(jnp.minimum(x, np.float32(2.0**127)), jnp.uint32)
        least = jnp.minimum(x, np.uint32(n << 23) - exponents)
        return self._op.wrap(lax.bitcast_convert_type(least, jnp.float32))


class OfNorms(Rule):
    """Base of rules that take norms; in `jax.shard_map` they need the mesh axes of the shards."""

    _: KW_ONLY
    axis_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Store the names as a tuple, which is hashable."""
        if self.axis_names is not None:
            object.__setattr__(self, "axis_names", tuple(self.axis_names))


def step_moments(
    stored: Mapping[str, StoredMoment],
    encoded: Sequence[Tree],
    keys: StepKeys,
    op: JaxOp,
    numbers: Values,
    new: Mapping[str, Encoded] = MappingProxyType({}),
) -> dict[str, StoredStepMoment]:
    """Return the moments of one leaf during a step; a moment in units of another comes after it.

    Without `numbers` no error is fed back. `new` is what earlier passes of the step stored.
    """
    moments: dict[str, StoredStepMoment] = {}
    rows = zip(stored.items(), encoded, strict=True)
    for (name, moment), old in sorted(rows, key=lambda row: bool(row[0][1].field.unit)):
        second = moments.get(moment.field.unit)
        moments[name] = StoredStepMoment(moment, old, keys, op, numbers, second, new.get(name))
    return moments


def checked(rule: Rule) -> Rule:
    """Return the rule with its hyperparameters checked and in float32; schedules stay as they are."""
    values = {}
    for name, number in declared(type(rule)).numbers.items():
        value = getattr(rule, name)
        if value is None and number.none is not None:
            value = number.none
        schedule = number.schedule and callable(value)
        values[name] = value if schedule else as_number(rule.name, name, value, number.check)
    for low, high in rule.ordered:
        check_order(rule.name, low, values[low], high, values[high])
    return with_fields(rule, values)


def with_fields(rule: Rule, values: Mapping[str, Scalar]) -> Rule:
    """Return the rule with other values of some fields, not checked."""
    copied = copy.copy(rule)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def schedules(rule: Rule) -> list[str]:
    """Return the names of the hyperparameters that follow a schedule."""
    return [name for name in declared(type(rule)).numbers if callable(getattr(rule, name))]


def numbers_at(rule: Rule, before: jax.Array | None, count: jax.Array | None) -> Values:
    """Return the numbers of a step of a checked rule, given the counts before and after it."""
    given = {name: getattr(rule, name) for name in declared(type(rule)).numbers}
    h = {name: at_count(rule.name, name, value, before) for name, value in given.items()}
    op = JaxOp(rule.name, coming=functools.partial(_coming, rule, count))
    # Arrays, and not numbers of a step: here they may be computed with one another.
    further = rule.numbers(_named(tuple(h))(*map(op.wrap, h.values())), Count(op, count), op)
    n = h | {name: op.bare(x) for name, x in further.items()}
    for name, moment in fed_back(rule).items():
        factor = divide(h[moment.rate], np.float32(1) - h[moment.rate])
        most = jnp.asarray(count).astype(jnp.float32) * np.float32(PER_STEP)
        n[name] = jnp.minimum(factor, jnp.maximum(most, np.float32(AT_LEAST)))
    return _named(tuple(n))(**n)


def _coming(rule: Rule, count: jax.Array | None, field: str, steps: int) -> jax.Array | None:
    """Return the numbers of a field for the steps after this one; None where no schedule gives them."""
    value = getattr(rule, field)
    return coming(rule.name, field, value, count, steps) if callable(value) and count is not None else None


@functools.cache
def _named(names: tuple[str, ...]) -> type[Values]:
    return collections.namedtuple("Numbers", names)


def static_form(rule: Rule) -> Rule:
    """Return the rule with constants only, hashable, so that leaves share a trace."""
    form = object.__new__(type(rule))
    fields = declared(type(rule))
    for name, value in vars(rule).items():
        if name == "seed":
            continue
        known = name not in fields.numbers or isinstance(value, np.floating)
        if not known:
            value = ReadFromNumbers(rule.name, name, f"n.{name}")
        elif name in fields.host_options:
            value = ReadFromNumbers(rule.name, name, "what `numbers` makes of it")
        object.__setattr__(form, name, value)
    return form


def state_of(rule: type[Rule]) -> Callable[[S], S]:
    """Declare a NamedTuple as the public state type of a rule."""

    def published(state: S) -> S:
        _PUBLISHED[rule] = state
        return state

    return published


def state_type(rule: type[Rule]) -> type[Tree]:
    """Return the NamedTuple of a rule's state: its own `State`, or one of `count`, `seed` and its moments."""
    return _PUBLISHED.get(rule) or vars(rule).get("State") or _derived_state(rule)


@functools.cache
def _derived_state(rule: type[Rule]) -> type[Tree]:
    names = list(declared(rule).moments)
    names += [*(f"{name}_scale" for name in names), "formats"]
    nothing = [optax.EmptyState()] * (len(names) // 2 + 1)
    made: Any = collections.namedtuple(  # a class, which is changed below
        "State", ("count", "seed", *names), defaults=nothing, module=rule.__module__
    )
    made.__qualname__ = f"{rule.__qualname__}.State"
    made.__reduce__ = lambda state: (_state_of, (rule, tuple(state)))
    return made


def _state_of(rule: type[Rule], fields: tuple) -> Tree:
    """Rebuild a derived state from a pickle: its type is no module attribute."""
    return _derived_state(rule)(*fields)
