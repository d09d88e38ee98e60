"""Base class for rules, which declare hyperparameters, moments and arithmetic once for both frameworks.

Both frameworks use the same `Rule`: `halfstep_jax.as_transform(rule)`, `halfstep_torch.chain(rule, ...)`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from halfstep.moments import Moments
    from halfstep.numbers import Count, Number, Numbers, Operand
    from halfstep.op import NumbersOp, Op
else:

    def dataclass_transform(**_: object) -> Callable[[type], type]:
        """Return the class as it is: only type checkers read this."""
        return lambda cls: cls


from halfstep import hyperparameters

SCOPES = ("elementwise", "parameter", "all")
ERRORS = ("", "linear", "amplified", "lasting")

_MISSING = dataclasses.MISSING
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # between the words of a class's name
_KEY = "halfstep"
Field: TypeAlias = Any
"""Type that checkers accept for a field of any type, as they accept `dataclasses.field`."""


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """The declaration of a hyperparameter field.

    Attributes:
        is_rate: whether it is an average's decay rate.
        schedule: whether it may be a function of the step count.
        check: function of (caller, name, value as given, float32 number) that raises for a wrong value.
        none: the number that None means, or None if None is an error.
        torch: the param group entry with the value, such as "lr" or "betas[0]". "" is the field's name, and
            None means no entry.
        owned: whether the rule gives the entry its default. Otherwise another rule in the chain does.
    """

    is_rate: bool = False
    schedule: bool = False
    check: hyperparameters.Check = hyperparameters.check_nonnegative
    none: float | None = None
    torch: str | None = ""
    owned: bool = True


@dataclasses.dataclass(frozen=True)
class Moment:
    """An array that a rule keeps between steps. See `moment`."""

    name: str = ""
    rate: str = ""
    signed: bool = True
    dtype: str = ""
    rounding: str = ""
    shape: Any = None  # a function, or the name of one, or None; see `moments_of`
    unit: str = ""
    torch: str = ""
    errors: str = ""
    always: str = ""
    copies_weights: bool = False
    of_any_size: bool = False
    stored_first: bool = False

    def shape_for(self, caller: str, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a weight's moment, and raise ValueError if it is not a tuple of integers."""
        own = self.shape(weight) if self.shape else weight
        if not isinstance(own, tuple) or not all(isinstance(n, int) and n >= 0 for n in own):
            raise ValueError(
                f"{caller}: the shape of {self.name} for weights of {weight} is {own!r}. "
                "Return a tuple of integers."
            )
        return own


def number(
    default: object = _MISSING,
    *,
    schedule: bool = False,
    check: hyperparameters.Check = hyperparameters.check_nonnegative,
    none: float | None = None,
    torch: str | None = "",
    owned: bool = True,
) -> Field:
    """Declare a hyperparameter, a float32 number that `update` reads at every step as `n.<field>`.

    Args:
        default: default value of the field.
        schedule: whether it may be a function of the step count.
        check: function that raises for a wrong value, by default if it is negative, infinite or NaN.
        none: the number that None means, such as infinity for no upper bound.
        torch: the entry with the value in torch's param groups, such as "lr". By default it is the field's
            name. With None there is no entry, and groups and schedulers do not change the value.
        owned: whether the rule gives the entry its default. If False, another rule in the chain does.

    Example:
        >>> class Scale(Rule):
        ...     factor: float = number(2.0)
        ...
        ...     def update(self, g, p, n, m, op):
        ...         return n.factor * g
        >>> Scale(factor=3.0)
        Scale(factor=3.0)
    """
    declaration = Hyperparameter(False, schedule, check, none, torch, owned)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def decay_rate(
    default: object = _MISSING,
    *,
    check: hyperparameters.Check = hyperparameters.check_decay_rate,
    torch: str | None = "",
) -> Field:
    """Declare an average's decay rate, a number in [0, 1) for `op.ema`.

    Args:
        default: default value of the field.
        check: function that raises for a wrong value, as in `number`.
        torch: the entry with the value in torch's param groups, such as "betas[0]". By default it is the
            field's name.
    """
    declaration = Hyperparameter(True, check=check, torch=torch)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def option(default: object = _MISSING) -> Field:
    """Declare an option that only `numbers` reads, so that one program serves all its values."""
    return dataclasses.field(default=default, metadata={_KEY: None})


def moment(
    *,
    rate: str = "",
    signed: bool = True,
    dtype: str = "",
    rounding: str = "",
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | str | None = None,
    unit: str = "",
    torch: str = "",
    errors: str = "",
    always: str = "",
    copies_weights: bool = False,
    of_any_size: bool = False,
    stored_first: bool = False,
) -> Moment:
    """Declare an array that a rule keeps between steps. It starts as zeros.

    The attribute's name is also the field name in an Optax state and the name for random words. In `update`,
    `m.<name>.value` is the array stored at the previous step. `m.<name>.round(x)` rounds x to the format,
    once, and keeps it as the new state. It returns the values to use in the update. These are the stored
    values or, if the rounding is "feedback", x less the amount that the error would add to later updates.

    Args:
        rate: field with its decay rate. A rounding to nearest that would freeze the moment raises an error.
        signed: False for a second moment, which is never negative and is stored as zero only if it is zero.
        dtype: field with its format, by default `<name>_dtype`. Without this field the moment is bfloat16 for
            bfloat16 weights, else float32.
        rounding: field with its rounding, by default `<name>_rounding`. Without this field it is "auto".
        shape: function from the weight's shape to the array's shape, for rules with scope "parameter", or the
            name of a property that returns such a function, the same object for equal options.
        unit: the second moment whose root may be this moment's unit, as in `relative(...)`. `update` rounds
            the second moment first.
        torch: its key in a torch optimizer's state, such as "exp_avg". By default it is the name.
        errors: effect of storage errors. "linear" means that the update is linear in the result of `round`,
            and the moment is an average or a sum with the rate `rate`. It allows the rounding "feedback"
            (contract F19). "amplified" means that the update magnifies errors, as a matrix factor does. Then
            "auto" is nearest unless that freezes, and too coarse codes raise an error (contract F20).
            "lasting" means that errors stay in an average over weights, and recipes use finer codes.
        always: the plain dtype of a moment without a format field, such as "float32", whatever the weights'
            dtype.
        copies_weights: whether the moment is the weight itself. It starts as the weight, rounded to nearest,
            and the model's weights are float32.
        of_any_size: whether its numbers may have any size, so that formats with a fixed range raise an error.
        stored_first: whether the update is computed from the stored values, so that formats that compute it
            before storing raise an error.
    """
    return Moment(**locals())


@dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Rule:
    """Base class for update rules. A subclass becomes a frozen dataclass, and both frameworks run it.

    Fields declared by `number` and `decay_rate` are checked, converted to float32 and passed to `update` as
    numbers. Other fields are options. Moments are attributes declared by `moment`, without an annotation. A
    field `seed`, if declared, seeds the random words.

    Attributes:
        name: name in messages, state dicts and files, by default the class name in snake case.
        scope: "elementwise", or "parameter" if an element's update reads other elements in its array, or
            "all" if it reads other arrays. With "all", only in JAX, `update` gets and returns tuples.
        needs: the input that `update` needs if an array is sharded over processes, for scope "parameter".
            "array" is the whole array. "norms" are the results of `op.norm`, and only norms are exchanged.
            Such an `update` keeps no moments, and reads the same norms whatever their values. "update" is the
            whole update without moments, and any one process can compute the result for all.
        reads_params: the reason why `update` reads the weights, for the error about missing `params`, or ""
            if it does not read them.
        ordered: pairs of hyperparameters in which the first must not be above the second.
        rounds_weights: whether `update` rounds the weights itself, by `m.param.round(w)`, and returns their
            change (contract P9). The rule must then be the last in its chain. Only for halfstep's own rules.

    Example:
        >>> class ScaleBySign(Rule):
        ...     b1: float = decay_rate(0.9)
        ...     mu_dtype: str | None = None
        ...     mu = moment(rate="b1", torch="exp_avg")
        ...
        ...     def update(self, g, p, n, m, op):
        ...         return op.sign(m.mu.round(op.ema(m.mu.value, g, n.b1)))
        >>> ScaleBySign(mu_dtype="bfloat16").name
        'scale_by_sign'

    Source: ours.
    """

    name: ClassVar[str] = "rule"
    scope: ClassVar[str] = SCOPES[0]
    needs: ClassVar[Literal["array", "norms", "update"]] = "array"
    reads_params: ClassVar[str] = ""
    ordered: ClassVar[tuple[tuple[str, str], ...]] = ()
    rounds_weights: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = _WORDS.sub("_", cls.__name__).lower()
        dataclasses.dataclass(frozen=True)(cls)

    # Rules need not repeat the argument types below, because editors inherit them.

    def numbers(self, h: "Numbers", t: "Count", op: "NumbersOp") -> Mapping[str, "Operand"]:
        """Return numbers that `update` reads besides the hyperparameters, or instead of some.

        Args:
            h: the hyperparameters in float32, by name.
            t: the step count, 1 at the first step, for `t + 1` or `t > 1`.
            op: the operations. `op.unbias((h.b1, t), ...)` returns 1 / (1 - b^t) for each pair, and
                `op.float32(t > 1)` a number.
        """
        return {}

    def axes_read(self, ndim: int) -> Iterable[int]:
        """Return the axes along which `update` reads other elements, unless the rule is elementwise."""
        return range(ndim)

    def update(
        self, g: "Number", p: "Number", n: "Numbers", m: "Moments", op: "Op"
    ) -> Any:  # or of scope "all", a tuple
        """Return the update, and round every moment once.

        The function is pure. Operators and `op` compute in float32, round once and protect their own
        products. It may read only options from `self`.

        Args:
            g: the incoming update.
            p: the weight, or None in JAX if `reads_params` is "".
            n: the numbers for the step, by name.
            m: the moments, with `m.mu.value` and `m.mu.round(x)`.
            op: operations besides +, -, * and /, such as `op.ema`, `op.sqrt` or `op.apply(function, x)`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Declared:
    """The declarations of a rule class.

    Attributes:
        numbers: the hyperparameters, by field.
        moments: the moments, by name, with the names of their fields filled in.
        options: the fields that `update` may read.
        host_options: the fields that only `numbers` reads.
    """

    numbers: dict[str, Hyperparameter]
    moments: dict[str, Moment]
    options: tuple[str, ...]
    host_options: tuple[str, ...]


@functools.cache
def declared(rule: type[Rule]) -> Declared:
    """Return a rule class's declarations, and raise ValueError if they are invalid or clash."""
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(rule)  # pyright: ignore[reportArgumentType]
    names = {field.name for field in fields}
    attributes = {key: getattr(rule, key) for base in reversed(rule.__mro__) for key in vars(base)}
    moments = {
        key: _with_fields(value, key, names) for key, value in attributes.items() if isinstance(value, Moment)
    }
    numbers = {f.name: f.metadata[_KEY] for f in fields if f.metadata.get(_KEY) is not None}
    host_options = tuple(f.name for f in fields if _KEY in f.metadata and f.name not in numbers)
    stored_as = {field for moment in moments.values() for field in (moment.dtype, moment.rounding)}
    options = tuple(sorted(names - {*numbers, *host_options, *stored_as, "seed"}))
    declarations = Declared(numbers, moments, options, host_options)
    _check(rule, declarations, names)
    return declarations


def moments_of(rule: Rule) -> dict[str, Moment]:
    """Return a rule's moments, by name, with functions as shapes."""
    return {
        name: dataclasses.replace(moment, shape=getattr(rule, moment.shape))
        if isinstance(moment.shape, str)
        else moment
        for name, moment in declared(type(rule)).moments.items()
    }


def _with_fields(moment: Moment, name: str, fields: set[str]) -> Moment:
    """Return a moment with its name, and with the fields named after it."""
    usual = {what: f"{name}_{what}" for what in ("dtype", "rounding")}
    chosen = {what: getattr(moment, what) or (f if f in fields else "") for what, f in usual.items()}
    return dataclasses.replace(moment, name=name, torch=moment.torch or name, **chosen)


def _check(rule: type[Rule], declarations: Declared, fields: set[str]) -> None:
    if rule.scope not in SCOPES:
        scopes = '"elementwise", "parameter" or "all"'
        raise ValueError(f"{rule.name}: scope={rule.scope!r} is not a scope. Use {scopes}.")
    if rule.rounds_weights and rule.__module__.partition(".")[0] != "halfstep":
        raise ValueError(
            f"{rule.name}: rounds_weights=True is for rules of halfstep, whose weights are rounded in every "
            "trial. Leave it out, and end the chain with round_stochastically()."
        )
    for name, moment in declarations.moments.items():
        if moment.errors not in ERRORS:
            raise ValueError(
                f"{rule.name}: the moment {name!r} has errors={moment.errors!r}. "
                'Use "linear", "amplified", "lasting", or leave it out.'
            )
        known = {
            "rate": set(declarations.numbers),
            "dtype": fields,
            "rounding": fields,
            "unit": set(declarations.moments),
        }
        for what, names in known.items():
            field = getattr(moment, what)
            if field and field not in names:
                kind = "moment" if what == "unit" else "field"
                raise ValueError(
                    f"{rule.name}: the moment {name!r} has {what}={field!r}, which is no {kind} of the rule. "
                    f"Declare {field}, or leave {what} out."
                )
        if rule.scope == "all":
            raise ValueError(f'{rule.name}: a rule of scope "all" keeps no moments. Use scope = "parameter".')
        if isinstance(moment.shape, str) and not hasattr(rule, moment.shape):
            raise ValueError(
                f"{rule.name}: the moment {name!r} has shape={moment.shape!r}, which is no property of the "
                "rule. Define it, or pass a function of the shape of the weight."
            )
        if moment.shape is not None and rule.scope == "elementwise":
            raise ValueError(
                f"{rule.name}: the moment {name!r} has a shape of its own, and the rule is elementwise. "
                'Give it scope = "parameter".'
            )
    _check_keys(rule, declarations)
    _check_entries(rule, declarations)


def _check_keys(rule: type[Rule], declarations: Declared) -> None:
    """Raise an error if the arrays of two moments share a state key or random words (contract W6)."""
    if {"mu", "trace"} <= declarations.moments.keys():
        name, other = (name for name in declarations.moments if name in ("mu", "trace"))
        raise ValueError(f"{rule.name}: {name} and {other} would share their random words. Rename one.")
    owners = {"step": "step", "count": "count", "seed": "seed"}
    for name, moment in declarations.moments.items():
        for key in (name, f"{name}_scale", moment.torch, f"{moment.torch}_scale"):
            if owners.setdefault(key, name) != name:
                raise ValueError(
                    f"{rule.name}: the moments {owners[key]!r} and {name!r} both use the key {key!r} of the "
                    'state. Rename one, or give it torch="...".'
                )


def _check_entries(rule: type[Rule], declarations: Declared) -> None:
    """Raise an error if two fields give the same param group entry its default."""
    owners: dict[str, str] = {}
    entries = {field: number.torch for field, number in declarations.numbers.items() if number.owned}
    entries |= {moment.dtype: "" for moment in declarations.moments.values() if moment.dtype}
    for field, entry in entries.items():
        if entry is None:
            continue
        entry = entry or field
        for other, owner in owners.items():
            whole = entry.partition("[")[0], other.partition("[")[0]
            if entry == other or (whole[0] == whole[1] and {entry, other} & set(whole)):
                raise ValueError(
                    f"{rule.name}: the fields {owner!r} and {field!r} both own torch's group entry "
                    f"{entry!r}. Give one of them another torch=..."
                )
        owners[entry] = field
