"""What a rule declares: its hyperparameters and moments, once for both frameworks, and its arithmetic.

A framework reads a `Rule` as it stands: `halfstep_jax.as_transform(rule)`, `halfstep_torch.chain(rule, ...)`.
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
"""Of the type of the field that it declares, as `dataclasses.field` is."""


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """What a field says of its value.

    Attributes:
        is_rate: whether it is the decay rate of an average.
        schedule: whether it may be a function of the count of steps.
        check: raises for a value that is wrong, given (caller, name, value as given, float32 number).
        none: the number for which None stands; None where None is refused.
        torch: the entry of a param group that holds it, such as "lr" or "betas[0]"; "" for the field's name;
            None: no entry holds it.
        owned: whether the rule gives that entry its default; otherwise another rule of the chain does.
    """

    is_rate: bool = False
    schedule: bool = False
    check: hyperparameters.Check = hyperparameters.check_nonnegative
    none: float | None = None
    torch: str | None = ""
    owned: bool = True


@dataclasses.dataclass(frozen=True)
class Moment:
    """An array that a rule keeps between steps; see `moment`."""

    name: str = ""
    rate: str = ""
    signed: bool = True
    dtype: str = ""
    rounding: str = ""
    shape: Any = None  # a function, or the name of one, or nothing; see `moments_of`
    unit: str = ""
    torch: str = ""
    errors: str = ""
    always: str = ""
    copies_weights: bool = False
    of_any_size: bool = False
    stored_first: bool = False

    def shape_for(self, caller: str, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the moment of a weight; refuse what is none."""
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
    """Declare a hyperparameter: float32, and a number of every step, `n.<field>` in `update`.

    Args:
        default: of the field.
        schedule: whether it may be a function of the count of steps.
        check: raises for a value that is wrong; by default for one that is negative, infinite or NaN.
        none: the number that None means, such as infinity for no upper bound.
        torch: the entry of torch's param groups that holds it, such as "lr"; the field's name unless given.
            None: no entry holds it, so that groups and schedulers do not change it.
        owned: False for an entry to which another rule of the chain gives the default.

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
    """Declare the decay rate of an average: a number in [0, 1), for `op.ema`.

    Args:
        default: of the field.
        check: raises for a value that is wrong, as in `number`.
        torch: the entry of torch's param groups that holds it, such as "betas[0]"; the field's name unless
            given.
    """
    declaration = Hyperparameter(True, check=check, torch=torch)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def option(default: object = _MISSING) -> Field:
    """Declare an option that `numbers` reads and `update` does not: all its values share one program."""
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
    """Declare an array that a rule keeps between steps; it starts as zeros.

    Its name is the attribute's: the name of its field in an Optax state, and of its random words. In
    `update`, `m.<name>.value` is the array as the step before stored it. `m.<name>.round(x)` rounds x to the
    format, once, and keeps it as the new state. It returns the values that the update goes on with. These are
    the stored values or, where the rounding is "feedback", x less what storing it would add to later updates.

    Args:
        rate: the field of its decay rate: a rounding to nearest that would freeze the moment is refused.
        signed: False for a second moment: never negative, and no other number is stored as zero.
        dtype: the field that says how it is stored; `<name>_dtype` unless given. Without such a field the
            moment is bfloat16 for bfloat16 weights, else float32.
        rounding: the field that says how it is rounded; `<name>_rounding` unless given, "auto" without.
        shape: a function from the shape of the weight to the shape of the array, for rules of scope
            "parameter". Or the name of a property that returns one, the same object for equal options.
        unit: the second moment in whose root this moment may be kept, as `relative(...)`; `update` rounds the
            second moment first.
        torch: its key in the state of a torch optimizer, such as "exp_avg"; its name unless given.
        errors: what becomes of errors of storing. "linear": the update is linear in what `round` returns, and
            the moment is an average or a sum of the rate `rate`. Then the rounding "feedback" is offered
            (contract F19). "amplified": the update magnifies them, as the factor of a matrix does. Then
            "auto" is nearest if that does not freeze, and codes that are too coarse are refused (contract
            F20). "lasting": they stay in an average of weights, and recipes keep finer codes.
        always: the plain dtype of a moment without a field for its format, such as "float32", whatever the
            dtype of the weights.
        copies_weights: whether it is the weight: it starts as the weight, rounded to nearest, and weights of
            the model are float32.
        of_any_size: whether its numbers may be of any size, so that formats of a fixed range are refused.
        stored_first: whether the update is made of what is stored, so that formats of which it is made before
            are refused.
    """
    return Moment(**locals())


@dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Rule:
    """Base of update rules. A subclass is made a frozen dataclass; both frameworks run it.

    Fields declared by `number` and `decay_rate` are checked, made float32 and passed to `update` as numbers;
    other fields are options. Moments are attributes declared by `moment`, without an annotation. A field
    `seed`, if there is one, seeds the random words.

    Attributes:
        name: in messages, state dicts and files; the class's name in snake case unless given.
        scope: "elementwise"; or "parameter", if the update of an element reads other elements of its array;
            or "all", if it reads other arrays. Under "all", in JAX alone, `update` gets and returns tuples.
        needs: of a rule of scope "parameter", what `update` needs of the array where processes have shards
            of it. "array": all of it. "norms": what `op.norm` returns, and they exchange norms alone; such an
            `update` keeps no moments, and asks for the same norms whatever their values. "update": its update
            alone, and no moments; any of the processes can compute it for all.
        reads_params: the reason why `update` reads the weights, for the error about missing `params`; "" if
            it does not read them.
        ordered: pairs of hyperparameters of which the first may not be above the second.
        rounds_weights: whether `update` rounds the weights itself, by `m.param.round(w)`, and returns their
            change (contract P9). The rule is then the last of its chain. For rules of halfstep alone.

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

    # Types of arguments are inherited: an editor knows them in every rule, which need not repeat them.

    def numbers(self, h: "Numbers", t: "Count", op: "NumbersOp") -> Mapping[str, "Operand"]:
        """Return numbers of a step that `update` reads beside the hyperparameters, or in place of some.

        Args:
            h: the hyperparameters in float32, by name.
            t: the count of this step, 1 at the first: `t + 1`, `t > 1`.
            op: `op.unbias((h.b1, t), ...)` returns 1 / (1 - b^t) of each pair; `op.float32(t > 1)`.
        """
        return {}

    def axes_read(self, ndim: int) -> Iterable[int]:
        """Return along which axes of an array `update` reads other elements, unless it is elementwise."""
        return range(ndim)

    def update(
        self, g: "Number", p: "Number", n: "Numbers", m: "Moments", op: "Op"
    ) -> Any:  # or of scope "all", a tuple
        """Return the update, and round every moment once on the way.

        Pure, in float32: operators and `op` round once and protect their own products. Of `self`, only
        options are known here.

        Args:
            g: the incoming update.
            p: the weight; None in JAX where `reads_params` is "".
            n: the numbers of the step, by name.
            m: the moments: `m.mu.value`, `m.mu.round(x)`.
            op: operations beside +, -, * and /: `op.ema`, `op.sqrt`, `op.where`, `op.apply(function, x)`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a class of rules declares.

    Attributes:
        numbers: the hyperparameters, by field.
        moments: by name, with the names of their fields filled in.
        options: the fields that `update` may read.
        host_options: the fields that `numbers` alone reads.
    """

    numbers: dict[str, Hyperparameter]
    moments: dict[str, Moment]
    options: tuple[str, ...]
    host_options: tuple[str, ...]


@functools.cache
def declared(rule: type[Rule]) -> Declared:
    """Return what a class of rules declares; refuse an unknown scope, and names that are missing or clash."""
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
    """Return the moments of a rule, by name, with shapes that are functions."""
    return {
        name: dataclasses.replace(moment, shape=getattr(rule, moment.shape))
        if isinstance(moment.shape, str)
        else moment
        for name, moment in declared(type(rule)).moments.items()
    }


def _with_fields(moment: Moment, name: str, fields: set[str]) -> Moment:
    """Return a moment with its name, and with the fields that go by its name."""
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
    """Refuse moments whose arrays would share a name in a state, or random words (contract W6)."""
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
    """Refuse two fields that give one entry of a param group its default."""
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
