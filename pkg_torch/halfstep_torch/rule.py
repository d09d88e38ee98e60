"""What an update rule is: its hyperparameters and stored moments as fields, and the arithmetic of one step.

A `Rule` lives with the optimizer: it reads its entries of a param group, checks them and turns them into the
float32 numbers of a step. `bind` makes of it, for one kind of parameter, a `BoundRule`: all choices made, no
number known. That is a pure function of tensors, and hashable, so that equal ones share a compiled kernel.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.numbers import hyperparameters
from halfstep_torch.numbers.moments import DecayRate
from halfstep_torch.numbers.random_words import role_of
from halfstep_torch.numbers.seeds import as_seed
from halfstep_torch.storage.formats import Format, as_format, default_format
from halfstep_torch.storage.state_array import Shape, StateArray, WordSource
from halfstep_torch.storage.stored_moment import Arrays, MomentStorage, StoredMoment, Words

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")
SCOPES = ("elementwise", "parameter", "all")

_OWN_NAME = ""


class ParamInfo(NamedTuple):
    """What decides how a parameter is stepped, besides the numbers.

    Attributes:
        dtype: of the weights, as the rule sees them.
        shape: of the parameter.
        name: of the parameter, where a rule of the chain reads names.
    """

    dtype: torch.dtype
    shape: Shape
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """What a field of a rule says of its value.

    Attributes:
        check: (caller, name, value) to the value in canonical form; raises for one that is wrong.
        entry: of the param group that holds it, such as "lr" or "betas[0]"; None: the rule alone does.
        owned: whether the rule gives the entry its default; else another rule of the chain does.
        is_rate: whether it is the decay rate of an average.
    """

    check: Callable[[str, str, Any], Any]
    entry: str | None = _OWN_NAME
    owned: bool = True
    is_rate: bool = False


def number(
    default: Any = dataclasses.MISSING,
    entry: str | None = _OWN_NAME,
    *,
    check: Callable[[str, str, Any], Any] = hyperparameters.nonnegative,
    owned: bool = True,
) -> Any:
    """Declare a hyperparameter: a field whose value is a number of every step, `n.<field>` in `update`.

    Args:
        default: of the field.
        entry: of the param group that holds it, such as "lr" or "betas[0]"; the field's own name unless
            given. None: no entry holds it, so that groups and schedulers do not change it.
        check: from (caller, name, value) to the float32 number; raises for a value that is wrong. Not
            negative, unless given.
        owned: False for an entry that another rule of the chain owns.

    Example:
        >>> from halfstep_torch import Rule
        >>> @dataclasses.dataclass(frozen=True)
        ... class Scale(Rule):
        ...     factor: float = number(2.0)
        ...
        ...     def update(self, g, p, n, moments):
        ...         return n.factor * g
        >>> Scale().entries
        {'factor': 2.0}
    """
    return _field(default, Hyperparameter(check, entry, owned))


def decay_rate(default: Any = dataclasses.MISSING, entry: str | None = _OWN_NAME) -> Any:
    """Declare the decay rate of an average, in [0, 1): a field, and in `update` the `n.<field>` of `ema`.

    Args:
        default: of the field.
        entry: as in `number`.
    """
    return _field(default, Hyperparameter(hyperparameters.decay_rate, entry, is_rate=True))


def host_only(default: Any) -> Any:
    """Declare a field that `update` does not read: rules that differ in it alone share a compiled kernel."""
    return _field(default, None)


def _field(default: Any, hyperparameter: Hyperparameter | None) -> Any:
    metadata = {"hyperparameter": hyperparameter}
    return dataclasses.field(default=default, metadata=metadata)  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A stored array that a rule declares. Made by `moment`.

    Attributes:
        name: in the contract: of the random words, and in what `store_state` selects.
        rate: the field that holds its decay rate, or None.
        signed: False for a second moment: what is not zero is not stored as zero.
        dtype: the field that says how it is stored; None: in the default dtype.
        rounding: the field that says how it is rounded; None: "auto".
        shape: from the shape of the parameter to that of the moment; None where they are the same.
    """

    name: str = ""
    rate: str | None = None
    signed: bool = True
    dtype: str | None = None
    rounding: str | None = None
    shape: Callable[[Shape], Shape] | None = None

    def check(self, caller: str, fmt: Format | None, rounding: str, rate: float, rate_name: str) -> None:
        """Raise ValueError for what is no rounding (contract F2), or would freeze the moment (F3).

        Args:
            caller: whose arguments they are, for the message.
            fmt: how the moment is to be stored; None, where the weights' dtype decides, cannot freeze yet.
            rounding: of the moment.
            rate: its decay rate, a float32 value.
            rate_name: what that is called.
        """
        if rounding not in ROUNDINGS:
            raise ValueError(
                f"{caller}: {self.rounding}={rounding!r} is not a rounding. "
                'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
            )
        if fmt is not None and rounding == "nearest" and fmt.freezes(rate):
            raise ValueError(
                f'{caller}: {self.dtype}={fmt.name} with {self.rounding}="nearest" freezes at '
                f"{rate_name}={rate:.7g} (1-{rate_name} < {fmt.codes.half_gap[1]}). "
                f'Use {self.rounding}="stochastic", or {self.dtype}="float32".'
            )

    def stored(self, key: str, fmt: Format, rounding: str, rate: float, shape: Shape) -> StoredMoment:
        """Return how the moment of a parameter is stored; "auto" is nearest unless that would freeze.

        Args:
            key: of its codes in the state.
            fmt: how it is to be stored.
            rounding: one of `ROUNDINGS`.
            rate: its decay rate, a float32 value.
            shape: of the moment.
        """
        fmt = fmt.for_shape(shape)
        stochastic = rounding == "stochastic" or (rounding == "auto" and fmt.freezes(rate))
        source = WordSource(role_of(self.name)) if stochastic and fmt.rounds else None
        return StoredMoment(key, fmt, source, "never" if self.signed else "always", self.shape)


def moment(
    name: str = "",
    *,
    rate: str | None = None,
    signed: bool = True,
    dtype: str | None = None,
    rounding: str | None = None,
    shape: Callable[[Shape], Shape] | None = None,
) -> Any:
    """Declare an array that a rule keeps between steps; it starts as zeros.

    The attribute's name is its key in the state; with a block scale there is a second array, `<key>_scale`.
    In `update`, `moments.<attribute>.value` is the array as it was stored at the step before, in float32,
    and `moments.<attribute>.round(x)` rounds x to the format, once, keeps the codes as the new state and
    returns what was stored.

    Args:
        name: in the contract, where that differs from the attribute's: "mu" is `exp_avg`. It gives the random
            words, and what `store_state` selects by.
        rate: the field that holds its decay rate: a rounding to nearest that would freeze it is refused.
        signed: False for a second moment: never negative, and what is not zero is not stored as zero.
        dtype: the field that says how it is stored, also a group entry; `<name>_dtype` unless given. A rule
            without such a field keeps the moment in bfloat16 for bfloat16 weights, else in float32.
        rounding: the field that says how it is rounded; `<name>_rounding` unless given, and "auto" without.
        shape: from the shape of the parameter to that of the array, for rules of scope "parameter"; the
            parameter's own unless given.
    """
    return Moment(name, rate, signed, dtype, rounding, shape)


class Rule:
    """A gradient transform, the base of all of them; a link of a `chain`.

    A subclass is a frozen dataclass. It declares its hyperparameters (`number`, `decay_rate`) and what it
    keeps (`moment`) as fields, other fields are options, and `update` is its arithmetic. A field `seed`, if
    there is one, seeds the random words of its moments; 0 otherwise.

    Attributes:
        name: in messages and state dicts; the class's own in snake case unless given.
        scope: what `update` sees: "elementwise": any stretch of a parameter, so that a step runs as one
            compiled kernel; "parameter": the whole array, in its shape; "all": the lists of the updates and
            weights of all parameters, and no moments.
        last: whether the rule must be the last of its chain, or of what another such rule wraps.
        wrapped_links: how many rules before this one see the float32 weights that it keeps.
        seed: of the words that the rule's moments read; a tuple where they read several (`WordSource`).
        reads_names: whether what it does depends on the name of the parameter.

    Example:
        >>> import dataclasses, torch, halfstep_torch as hs
        >>> @dataclasses.dataclass(frozen=True)
        ... class ScaleBySign(hs.Rule):
        ...     b1: float = hs.decay_rate(0.9)
        ...     mu_dtype: str | None = None
        ...     exp_avg = hs.moment("mu", rate="b1")
        ...
        ...     def update(self, g, p, n, moments):
        ...         m = moments.exp_avg
        ...         return torch.sign(m.round(hs.ema(m.value, g, n.b1)))
        >>> tx = hs.chain(ScaleBySign(mu_dtype="bfloat16"), hs.scale_by_learning_rate(0.5))
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> p.grad = torch.tensor([3.0, -3.0])
        >>> hs.Optimizer([p], tx).step()
        >>> p.tolist()
        [0.5, 1.5]
    """

    name: ClassVar[str] = "rule"
    scope: ClassVar[str] = "elementwise"
    last: ClassVar[bool] = False
    wrapped_links: int = 0
    seed: Any = None
    reads_names: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def update(self, g: Any, p: Any, n: Any, moments: Any) -> Any:
        """Return the outgoing update, float32, in the shape of `g`.

        Pure. Of `self`, only options are known here; numbers are those of `n`.

        Args:
            g: incoming update, float32.
            p: the weights, float32.
            n: the numbers of the step, by name: floats, or float32 0-d tensors in compiled code. What
                depends on them alone belongs to `numbers`.
            moments: what the rule declares, by name: `.value` and `.round(x)`.
        """
        raise NotImplementedError

    def numbers(self, h: Any, step: int) -> Mapping[str, Any]:
        """Return numbers of a step that `update` reads beside the hyperparameters, or in place of some.

        Args:
            h: the hyperparameters, float32 values, by name.
            step: the count after its increment, 1 at the first update.
        """
        return {}

    def check(self, caller: str, h: Any) -> None:
        """Raise ValueError if hyperparameters do not go together.

        Args:
            caller: for messages.
            h: the hyperparameters, by name.
        """
        return

    def acts(self, h: Any, info: ParamInfo) -> bool:
        """Whether the rule does anything to such a parameter, given its hyperparameters."""
        return True

    def applies_to(self, name: str, param: Tensor) -> bool:
        """Whether the rule touches this parameter at all; asked once per parameter."""
        return True

    def check_choice(self, caller: str, h: Any, infos: Sequence[ParamInfo]) -> None:
        """Raise ValueError if something was to be chosen from all parameters of a group, and nothing is.

        Args:
            caller: for messages.
            h: the hyperparameters, by name.
            infos: of the parameters that the rule applies to.
        """
        return

    @property
    def entries(self) -> dict[str, Any]:
        """Param-group entries that the rule owns, with their defaults; a group's own value wins."""
        entries: dict[str, Any] = {}
        for field, read in declared(type(self)).read.items():
            if read.entry is not None and read.owned:
                key, indexed, _ = (read.entry or field).partition("[")
                value = getattr(self, field)
                entries[key] = (*entries.get(key, ()), value) if indexed else value
        return entries

    def read(self, caller: str, group: Mapping[str, Any]) -> Any:
        """Return a group's values of the fields, by name, checked and in canonical form.

        Args:
            caller: whose arguments they are, for messages.
            group: a param group.

        Raises:
            TypeError: if a value is of a wrong type.
            ValueError: if a value is out of range.
        """
        read, values = declared(type(self)).read, {}
        counts = collections.Counter((r.entry or field).partition("[")[0] for field, r in read.items())
        for field, one in read.items():
            entry = field if one.entry is None else one.entry or field
            key, indexed, index = entry.partition("[")
            if one.entry is None:
                value = getattr(self, field)
            elif indexed:
                value = hyperparameters.several(caller, key, group[key], counts[key])[int(index[:-1])]
            else:
                value = group[key]
            values[field] = one.check(caller, entry, value)
        h = named_tuple("Hyperparameters", tuple(read))(**values)
        self.check(caller, h)
        return h

    def checked(self) -> Any:
        """Return the rule with its values in canonical form.

        Raises:
            TypeError: for a value of a wrong type.
            ValueError: for one out of range, or a rounding that freezes a moment.
        """
        found = declared(type(self))
        values = {
            field: read.check(self.name, field, getattr(self, field)) for field, read in found.read.items()
        }
        h = named_tuple("Hyperparameters", tuple(values))(**values)
        self.check(self.name, h)
        for one in found.moments.values():
            fmt, rounding, rate = self._storage(one, h)
            one.check(self.name, fmt, rounding, rate, one.rate or "")
        formats = {one.dtype for one in found.moments.values() if one.dtype}
        canonical: dict[str, Any] = {field: group_value(values[field]) for field in formats}
        if self._has("seed"):
            canonical["seed"] = as_seed(self.name, self.seed)
        return dataclasses.replace(self, **canonical)  # pyright: ignore[reportArgumentType]

    def with_seed(self, seed: Any) -> Any:
        """Return the same rule with other random words."""
        return dataclasses.replace(self, seed=seed) if self._has("seed") else self  # pyright: ignore

    def step_numbers(self, h: Any, step: int) -> Any:
        """Return the numbers of one step, by name, all float32 values; a decay rate as a `DecayRate`."""
        numbers: dict[str, Any] = {}
        for field, one in declared(type(self)).hyperparameters.items():
            value = getattr(h, field)
            if isinstance(value, float):
                numbers[field] = DecayRate.of(value) if one.is_rate else value
        numbers.update(self.numbers(h, step))
        return named_tuple("Numbers", tuple(numbers))(**{k: _as_float32(x) for k, x in numbers.items()})

    def bind(self, caller: str, h: Any, info: ParamInfo) -> "BoundRule | None":
        """Return what the rule does to such parameters, or None for nothing.

        Args:
            caller: for messages.
            h: what `read` gave.
            info: what parameters.

        Raises:
            ValueError: if the values do not go together for such parameters.
        """
        if not self.acts(h, info):
            return None
        found = declared(type(self))
        moments = []
        for key, one in found.moments.items():
            fmt, rounding, rate = self._storage(one, h)
            fmt = fmt or default_format(info.dtype)
            one.check(caller, fmt, rounding, rate, found.rate_name(one))
            shape = tuple(one.shape(info.shape)) if one.shape else tuple(info.shape)
            moments.append(one.stored(key, fmt, rounding, rate, shape))
        blank = dict.fromkeys(found.blank)
        return BoundRule(dataclasses.replace(self, **blank), tuple(moments))  # pyright: ignore

    def _storage(self, one: Moment, h: Any) -> tuple[Format | None, str, float]:
        """Return format, rounding and decay rate of a moment, as they were given."""
        rounding = getattr(self, one.rounding) if one.rounding else "auto"
        return (
            getattr(h, one.dtype) if one.dtype else None,
            rounding,
            getattr(h, one.rate) if one.rate else 0.0,
        )

    def _has(self, field: str) -> bool:
        return any(own.name == field for own in dataclasses.fields(self))  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the fields of a class of rules declare.

    Attributes:
        hyperparameters: by field.
        moments: by attribute, with the names of their fields filled in.
        read: the hyperparameters, and the fields that say how moments are stored.
        blank: the fields that a bound rule does not know.
    """

    hyperparameters: dict[str, Hyperparameter]
    moments: dict[str, Moment]
    read: dict[str, Hyperparameter]
    blank: tuple[str, ...]

    def rate_name(self, one: Moment) -> str:
        """Return what the decay rate of a moment is called in a param group."""
        if one.rate is None:
            return ""
        entry = self.hyperparameters[one.rate].entry
        return one.rate if not entry or "[" in entry else entry


@functools.cache
def declared(rule: type[Rule]) -> Declared:
    """Return what the fields of a class of rules declare."""
    if "__dataclass_fields__" not in vars(rule):
        raise TypeError(
            f"{rule.__name__}: not a dataclass. Decorate the class with @dataclasses.dataclass(frozen=True)."
        )
    fields = {field.name: field for field in dataclasses.fields(rule)}  # pyright: ignore
    found = {
        key: value
        for base in reversed(rule.__mro__)
        for key, value in vars(base).items()
        if isinstance(value, Moment)
    }
    moments = {key: _with_fields(one, key, set(fields)) for key, one in found.items()}
    signed = {one.dtype: one.signed for one in moments.values() if one.dtype}
    numbers, read, blank = {}, {}, [one.rounding for one in moments.values() if one.rounding]
    for name, field in fields.items():
        declaration = field.metadata.get("hyperparameter")
        if name in signed:
            read[name] = Hyperparameter(functools.partial(as_format, signed=signed[name]))
        elif isinstance(declaration, Hyperparameter):
            numbers[name] = read[name] = declaration
        if name in read or name == "seed" or "hyperparameter" in field.metadata:
            blank.append(name)
    return Declared(numbers, moments, read, tuple(dict.fromkeys(blank)))


def _with_fields(one: Moment, key: str, fields: set[str]) -> Moment:
    """Return a moment with the names of its fields filled in where it leaves them to its own name."""
    name = one.name or key
    chosen: dict[str, Any] = {"name": name}
    for what in ("dtype", "rounding"):
        given, usual = getattr(one, what), f"{name}_{what}"
        chosen[what] = given or (usual if usual in fields else None)
    return dataclasses.replace(one, **chosen)


class StepMoment:
    """A moment during one step: what was stored, and rounding what is to be.

    Attributes:
        value: the float32 values that the step before stored.
        arrays: the new state arrays, once `round` was called.
    """

    def __init__(self, storage: MomentStorage, state: Arrays, words: Sequence[Words], shape: Shape | None):
        self._storage, self._words, self._shape = storage, words, shape
        value = storage.decode(state)
        self.value = value if shape is None else value.view(shape)
        self.arrays: Arrays = {}

    def round(self, x: Tensor) -> Tensor:
        """Round x to the format, once, for the new state; return what was stored, in float32."""
        self.arrays, values = self._storage.encode(x if self._shape is None else x.reshape(-1), self._words)
        return values if self._shape is None else values.view(self._shape)


class Moments:
    """The moments of a rule during one step, as attributes."""

    def __init__(self, rule: str, moments: Mapping[str, StepMoment]):
        self._rule = rule
        self.__dict__.update(moments)

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
        moments, at = {}, 0
        for one in self.moments:
            shape = None
            if self.scope == "parameter":
                shape_of = one.arrays[one.key].shape_of
                shape = tuple(p.shape) if shape_of is None else tuple(shape_of(tuple(p.shape)))
            moments[one.key] = StepMoment(one, state, words[at : at + len(one.sources)], shape)
            at += len(one.sources)
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


def _as_float32(value: Any) -> Any:
    return value if isinstance(value, tuple) else float(np.float32(value))


def group_value(fmt: Format | None) -> Format | str | None:
    """Return a format as it stands in a param group: a plain one by its name."""
    return fmt if fmt is None or fmt.scaled else fmt.name
