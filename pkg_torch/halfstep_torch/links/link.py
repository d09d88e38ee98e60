"""A link of a chain: a rule, read from a param group, and bound to a kind of parameter.

The optimizer keeps a `Link`, which reads its entries of a param group, checks them and turns them into the
float32 numbers of a step. `bind` returns a `BoundRule` for one kind of parameter, which has all choices but
no numbers.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values, check_order
from halfstep.makers import docstring_of, published
from halfstep.moments import AT_LEAST, PER_STEP, fed_back
from halfstep.recipes import takes_recipe
from halfstep.rule import Moment, Rule, declared
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.entries import Entry, entries_of
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.moments import DecayRate
from halfstep_torch.numbers.op import NumbersOp
from halfstep_torch.numbers.schedules import Scheduled
from halfstep_torch.numbers.seeds import LinkSeed, as_seed
from halfstep_torch.numbers.tensor_numbers import TensorCount, TensorNumbersOp
from halfstep_torch.storage.bound_moments import bound_moments, check_moments
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import Shape

P = ParamSpec("P")
R = TypeVar("R", bound=Rule)
L = TypeVar("L")


class ParamInfo(NamedTuple):
    """The facts that decide how a parameter is stepped, besides numbers.

    Attributes:
        dtype: the dtype of the weights in `update`.
        shape: the shape of the parameter.
        name: the name of the parameter, if a rule of the chain reads names.
    """

    dtype: torch.dtype
    shape: Shape
    name: str = ""


class LateNumbers(dict):
    """Numbers that a link measured, kept on a device as 0-d tensors.

    Attributes:
        rows: all numbers, float32, with at least one row for each parameter.
    """

    def __init__(self, names: Sequence[str], rows: Tensor) -> None:
        super().__init__(zip(names, rows[0], strict=True))
        self.rows = rows


class Link(Rule):
    """A link of a torch chain: the base of rules that only torch has.

    A `Rule` of both frameworks needs nothing from this class, because `chain` makes a link of it
    (`RuleLink`).

    Attributes:
        last: whether the rule must be the last in its chain, or in the chain that such a rule wraps.
        wrapped_links: the number of rules before this rule that get the float32 weights it keeps.
        seed: the seed of the moments' random words, or a tuple for several sources (`WordSource`).
        reads_names: whether the rule depends on the parameter's name.
        measures: whether some numbers depend on all gradients (`measure`). The rule must then be the first
            in its chain.
        needs_finite: whether an infinity or NaN in a gradient would spread over the whole parameter. A step
            then raises before anything changes.
    """

    last = False
    wrapped_links = 0
    seed = None
    reads_names = False
    measures = False
    needs_finite = False

    # Methods that a rule of torch may override.

    def measure(self, h: Values, norms: Callable[[bool], Tensor]) -> Mapping[str, Tensor]:
        """Return numbers for `update` that depend on all gradients, such as their norm.

        `norms` returns the gradient norms of all parameters that the rule touches, on any device. Its
        argument is whether the norms must be exact, as in `numbers.norms.norms`. The numbers are float32 or
        0-d tensors.
        """
        return {}

    def is_noop(self, h: Values, info: ParamInfo) -> bool:
        """Whether the rule never changes the update of such a parameter, given its hyperparameters."""
        return False

    def touches(self, name: str, param: Tensor) -> bool:
        """Whether the rule touches this parameter. It is called once per parameter."""
        return True

    def check_choice(self, caller: str, h: Values, infos: Sequence[ParamInfo]) -> None:
        """Raise ValueError if the rule selects from the parameters of a group and finds none."""
        return

    # Properties derived from the declarations.

    @property
    def rule(self) -> Rule:
        """The rule with the declarations and the arithmetic."""
        return self

    @property
    def entry_fields(self) -> Sequence[Entry]:
        """The rule's fields that are read from a param group or from the rule itself."""
        return entries_of(type(self.rule))

    @property
    def entries(self) -> Group:
        """Param-group entries of the rule with their defaults, which groups may override."""
        entries: Group = {}
        for entry in self.entry_fields:
            if entry.owned:
                value = getattr(self.rule, entry.field)
                entries[entry.key] = value if entry.index is None else (*entries.get(entry.key, ()), value)
        return entries

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The rule's state arrays by torch's names, without scales."""
        return tuple(moment.torch for moment in declared(type(self.rule)).moments.values())

    def read(self, caller: str, group: Group) -> Values:
        """Return a group's values of the fields, by name, checked and in canonical form."""
        values = {entry.field: entry.read(caller, self.rule, group) for entry in self.entry_fields}
        h = _hyperparameters(values)
        check_bounds(self.rule, caller, h)
        return h

    def with_seed(self, seed: LinkSeed) -> "Link":
        """Return the same rule with other random words."""
        return dataclasses.replace(self, seed=seed) if has_field(self, "seed") else self

    def step_numbers(self, h: Values, step: int, measured: Mapping[str, Tensor] | None = None) -> Values:
        """Return the float32 numbers of one step by name. A rule of halfstep gets `DecayRate`s.

        `step` is the count after its increment. `measured` is the result of `measure`, if the rule has one.
        """
        values, given, ours = {}, {}, is_ours(type(self.rule))
        for field, number in declared(type(self.rule)).numbers.items():
            value = getattr(h, field)
            value = value.at(step) if isinstance(value, Scheduled) else value
            values[field] = np.float32(value)
            given[field] = DecayRate.of(value) if number.is_rate and ours else value
        with np.errstate(all="ignore"):  # infinities are allowed: at lr = 0 nothing moves
            op: Any = NumbersOp(h, step)  # of NumPy's scalars, as `halfstep.op.NumbersOp` of Numbers
            numbers = given | self._made_numbers(values, step, op)
        numbers.update(measured or {})
        stays = (DecayRate, Tensor) if isinstance(measured, LateNumbers) else DecayRate
        rounded = [x if isinstance(x, stays) else float(np.float32(x)) for x in numbers.values()]
        return named_tuple("Numbers", tuple(numbers))(*rounded)

    def tensor_numbers(self, values: Mapping[str, Tensor], counts: Tensor, coming: Tensor) -> list[Tensor]:
        """Return the numbers of `step_numbers` in the order of `flat`, as tensors.

        Args:
            values: the values of fields that are numbers, by name.
            counts: the counts after their increment, an int64 column.
            coming: as in `TensorNumbersOp`.

        Raises:
            NotImplementedError: if the rule needs the host.
        """
        op, made = TensorNumbersOp(self.rule.name, coming), []
        # Any: numbers of the host, or arrays that stand for them.
        given: dict[str, Any] = {field: op.wrap(value) for field, value in values.items()}
        numbers = given | self._made_numbers(given, TensorCount(counts, op), op)
        declarations, ours = declared(type(self.rule)).numbers, is_ours(type(self.rule))
        for name, x in numbers.items():
            made.append(op.bare(x))
            if ours and x is given.get(name) and declarations[name].is_rate:
                made.append(op.bare(1 - x))
        return made

    # Any: as in `tensor_numbers`.
    def _made_numbers(self, values: Mapping[str, Any], step: Any, op: Any) -> dict[str, Any]:
        """Return the numbers that the rule computes, and the factors of moments with feedback."""
        numbers = dict(self.rule.numbers(_hyperparameters(values), step, op))
        for name, moment in self._fed_back.items():
            rate = values[moment.rate]
            most = op.maximum(op.float32(step) * np.float32(PER_STEP), np.float32(AT_LEAST))
            numbers[name] = op.minimum(rate / (1 - rate), most)
        return numbers

    @functools.cached_property
    def counts(self) -> bool:
        """Whether the numbers of a step may depend on its count."""
        return self.measures or type(self.rule).numbers is not Rule.numbers or bool(self._fed_back)

    @functools.cached_property
    def _fed_back(self) -> Mapping[str, Moment]:
        return fed_back(self.rule)

    def bind(self, caller: str, h: Values, info: ParamInfo) -> "BoundRule | None":
        """Return the rule bound to such parameters with the values of `read`, or None without effect."""
        if self.is_noop(h, info):
            return None
        rule = self.rule
        moments = bound_moments(caller, rule, h, info.dtype, tuple(info.shape))
        known = declared(type(rule)).options
        unknown = {field.name: None for field in dataclasses.fields(rule) if field.name not in known}
        bare, theirs = dataclasses.replace(rule, **unknown), not is_ours(type(rule))
        weight_dtype = dtype_name(info.dtype) if rule.rounds_weights else ""
        # Norms are in float32 for weights of any dtype.
        wide = theirs or (bool(rule.reads_params) and rule.needs != "norms")
        return BoundRule(bare, moments, wide, tensor_numbers=theirs, weight_dtype=weight_dtype)

    def bind_key(self, h: Values) -> tuple:
        """Return the hyperparameters that `bind` reads. The bound rule is kept until they change."""
        cls = type(self)
        if cls.is_noop is not Link.is_noop or cls.bind is not Link.bind:
            return tuple(h)
        moments = declared(type(self.rule)).moments.values()
        fields = (field for moment in moments for field in (moment.dtype, moment.rate) if field)
        return tuple(getattr(h, field) for field in fields)


class RuleLink(Link):
    """A rule of both frameworks, as a link.

    Attributes:
        inner: the rule.
    """

    inner: Rule

    @property
    def rule(self) -> Rule:
        """The rule itself."""
        return self.inner

    def __post_init__(self) -> None:
        """Copy the rule's declarations. The link must be the last if the rule rounds the weights."""
        rule = self.inner
        vars(self).update(
            name=rule.name, scope=rule.scope, last=rule.rounds_weights, seed=getattr(rule, "seed", None)
        )

    def with_seed(self, seed: LinkSeed) -> Link:
        """Return the same rule with other random words."""
        if not has_field(self.inner, "seed"):
            return self
        return RuleLink(dataclasses.replace(self.inner, seed=seed))  # pyright: ignore


def as_link(rule: Rule) -> Link:
    """Return a rule as a link."""
    if not isinstance(rule, Link):
        rule = RuleLink(rule)
    declared(type(rule.rule))
    if rule.scope == "all":
        raise ValueError(
            f'{rule.name}: scope="all" is JAX\'s alone. Use scope = "parameter", or clip_by_global_norm.'
        )
    return rule


def checked_rule(rule: R) -> R:
    """Return a rule with its values in canonical form."""
    entries, moments = entries_of(type(rule)), declared(type(rule)).moments.values()
    fields = ((entry, entry.field, getattr(rule, entry.field)) for entry in entries)
    values = {field: entry.check(rule.name, field, value) for entry, field, value in fields}
    h = _hyperparameters(values)
    check_bounds(rule, rule.name, h)
    check_moments(rule, h)
    formats = {moment.dtype for moment in moments if moment.dtype}
    canonical: dict[str, object] = {field: group_value(getattr(h, field)) for field in formats}
    if has_field(rule, "seed"):
        canonical["seed"] = as_seed(rule.name, rule.seed)  # pyright: ignore[reportAttributeAccessIssue]
    return dataclasses.replace(rule, **canonical)


def link_of(rule: Callable[P, R], make: Callable[[R], L] = checked_rule) -> Callable[P, L]:
    """Return a function that makes checked links of a rule class, with its arguments and docstring."""

    @functools.wraps(rule, updated=())
    def link(*args: P.args, **options: P.kwargs) -> L:
        return make(rule(*args, **options))

    published(link, getattr(rule, "name", rule.__name__), docstring_of(rule))
    return takes_recipe(declared(rule).moments.values(), stores_weights=False)(link)


def check_bounds(rule: Rule, caller: str, h: Values) -> None:
    """Raise ValueError if a lower bound is above its upper bound."""
    for low, high in rule.ordered:
        check_order(caller, low, getattr(h, low), high, getattr(h, high))


@functools.cache
def is_ours(rule: type[Rule]) -> bool:
    """Whether a rule class belongs to these packages."""
    return rule.__module__.partition(".")[0] in ("halfstep", "halfstep_torch")


def has_field(rule: Rule, name: str) -> bool:
    """Whether a rule has a field of that name."""
    return any(field.name == name for field in dataclasses.fields(rule))


def _hyperparameters(values: Mapping[str, object]) -> Values:
    return named_tuple("Hyperparameters", tuple(values))(**values)


@functools.cache
def named_tuple(name: str, fields: tuple[str, ...]) -> type[Values]:
    """Return the named-tuple class with these fields."""
    return collections.namedtuple(name, fields)


def group_value(fmt: Format | None) -> Format | str | None:
    """Return a format as a param group holds it: a plain format by name."""
    return fmt if fmt is None or fmt.scaled or fmt.relative else fmt.dtype
