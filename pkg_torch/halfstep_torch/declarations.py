"""The fields of an update rule: hyperparameters, and the moments that it stores; what a class declares."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from halfstep.storage.moment_formats import check_format, check_freezing, check_rounding, is_stochastic
from halfstep_torch.numbers import hyperparameters
from halfstep_torch.numbers.random_words import role_of
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import Shape, WordSource
from halfstep_torch.storage.state_dtypes import as_format
from halfstep_torch.storage.stored_moment import StoredMoment, scale_key

SCOPES = ("elementwise", "parameter")

_OWN_NAME = ""


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
        unit: the attribute of the second moment whose root may be its unit; "" for none.
    """

    name: str = ""
    rate: str | None = None
    signed: bool = True
    dtype: str | None = None
    rounding: str | None = None
    shape: Callable[[Shape], Shape] | None = None
    unit: str = ""

    def check(self, caller: str, fmt: Format | None, rounding: str, rate: float, rate_name: str) -> None:
        """Raise ValueError for what is no rounding (contract F2), or would freeze the moment (F3).

        Args:
            caller: whose arguments they are, for the message.
            fmt: how the moment is to be stored; None, where the weights' dtype decides, cannot freeze yet.
            rounding: of the moment.
            rate: its decay rate, a float32 value.
            rate_name: what that is called.
        """
        check_rounding(caller, self.rounding or "", rounding)
        if fmt is not None:
            dtype = self.dtype or ""
            check_format(caller, dtype, fmt, name=self.name, signed=self.signed, unit=self.unit)
            names = {"dtype": dtype, "rounding": self.rounding or "", "rate": rate_name}
            check_freezing(caller, fmt, rounding, rate, names)

    def stored(self, key: str, fmt: Format, rounding: str, rate: float, shape: Shape) -> StoredMoment:
        """Return how the moment of a parameter is stored; "auto" is nearest unless that falls short.

        Args:
            key: of its codes in the state.
            fmt: how it is to be stored.
            rounding: one of `moment_formats.ROUNDINGS`.
            rate: its decay rate, a float32 value.
            shape: of the moment.
        """
        fmt = fmt.for_shape(shape)
        stochastic = is_stochastic(fmt, rounding, rate, self.rate is not None)
        unit = self.unit if fmt.relative else ""
        source = WordSource(role_of(self.name)) if stochastic else None
        return StoredMoment(key, fmt, source, "never" if self.signed else "always", self.shape, unit)


def moment(
    name: str = "",
    *,
    rate: str | None = None,
    signed: bool = True,
    dtype: str | None = None,
    rounding: str | None = None,
    shape: Callable[[Shape], Shape] | None = None,
    unit: str = "",
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
        unit: the attribute of the second moment in whose root it may be kept: such a moment can be asked for
            as `relative(...)`, and `update` rounds the second moment first.
    """
    return Moment(name, rate, signed, dtype, rounding, shape, unit)


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
def declared(rule: type) -> Declared:
    """Return what the fields of a class of rules declare."""
    name = rule.__name__
    if "__dataclass_fields__" not in vars(rule):
        raise TypeError(
            f"{name}: not a dataclass. Decorate the class with @dataclasses.dataclass(frozen=True)."
        )
    fields = {field.name: field for field in dataclasses.fields(rule)}  # pyright: ignore
    found = {
        key: value
        for base in reversed(rule.__mro__)
        for key, value in vars(base).items()
        if isinstance(value, Moment)
    }
    moments = {key: _with_fields(one, key, set(fields)) for key, one in found.items()}
    formats = {one.dtype for one in moments.values() if one.dtype}
    numbers, read, blank = {}, {}, [one.rounding for one in moments.values() if one.rounding]
    for own, field in fields.items():
        declaration = field.metadata.get("hyperparameter")
        if own in formats:
            read[own] = Hyperparameter(as_format)
        elif isinstance(declaration, Hyperparameter):
            numbers[own] = read[own] = declaration
        if own in read or own == "seed" or "hyperparameter" in field.metadata:
            blank.append(own)
    _check_moments(rule, found, set(fields), set(numbers))
    _check_entries(name, read)
    return Declared(numbers, moments, read, tuple(dict.fromkeys(blank)))


def _with_fields(one: Moment, key: str, fields: set[str]) -> Moment:
    """Return a moment with the names of its fields filled in where it leaves them to its own name."""
    name = one.name or key
    chosen: dict[str, Any] = {"name": name}
    for what in ("dtype", "rounding"):
        given, usual = getattr(one, what), f"{name}_{what}"
        chosen[what] = given or (usual if usual in fields else None)
    return dataclasses.replace(one, **chosen)


def _check_moments(rule: type, moments: dict[str, Moment], fields: set[str], numbers: set[str]) -> None:
    """Raise ValueError unless every moment names fields of the rule, and has a key and words of its own."""
    name, scope = rule.__name__, getattr(rule, "scope", SCOPES[0])
    if scope not in SCOPES:
        raise ValueError(f'{name}: scope={scope!r} is not a scope. Use "elementwise" or "parameter".')
    owners: dict[str, str] = {}
    for key, one in moments.items():
        for what, names in (("rate", numbers), ("dtype", fields), ("rounding", fields)):
            field = getattr(one, what)
            if field is not None and field not in names:
                raise ValueError(
                    f"{name}: the moment {key!r} has {what}={field!r}, which is no field of the rule. "
                    f"Declare {field}, or leave {what} out."
                )
        if one.shape is not None and scope == "elementwise":
            raise ValueError(
                f"{name}: the moment {key!r} has a shape of its own, and the rule is elementwise. "
                'Give it scope = "parameter".'
            )
        for taken, what in ((key, "key"), (scale_key(key), "key"), (f"{one.name or key} words", "name")):
            if taken in owners or taken == "step":
                other = owners.get(taken, "step")
                raise ValueError(
                    f"{name}: the moments {other!r} and {key!r} have one {what} in the state. Rename one."
                )
            owners[taken] = key


def _check_entries(name: str, read: dict[str, Hyperparameter]) -> None:
    """Raise ValueError if two fields own one entry of the param groups."""
    owners: dict[str, str] = {}
    for field, one in read.items():
        entry = one.entry or field
        if one.entry is None or not one.owned:
            continue
        if entry in owners:
            raise ValueError(
                f"{name}: the fields {owners[entry]!r} and {field!r} both own the group entry {entry!r}. "
                "Give one of them another entry."
            )
        owners[entry] = field
