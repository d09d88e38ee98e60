"""What an update rule is: its hyperparameters and stored moments as fields, and the arithmetic of one step.

A `Rule` lives with the optimizer: it reads its entries of a param group, checks them and turns them into the
float32 numbers of a step. `bind` makes of it, for one kind of parameter, a `BoundRule`: all choices made, no
number known.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.storage.relative import LARGEST_BOUND, bound
from halfstep_torch.bound_rule import BoundRule, named_tuple
from halfstep_torch.declarations import Declared, Moment, declared
from halfstep_torch.numbers import hyperparameters
from halfstep_torch.numbers.moments import DecayRate
from halfstep_torch.numbers.seeds import as_seed
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import Shape
from halfstep_torch.storage.state_dtypes import default_format


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


class Rule:
    """A gradient transform, the base of all of them; a link of a `chain`.

    A subclass is a frozen dataclass. It declares its hyperparameters (`number`, `decay_rate`) and what it
    keeps (`moment`) as fields, other fields are options, and `update` is its arithmetic. A field `seed`, if
    there is one, seeds the random words of its moments; 0 otherwise.

    Attributes:
        name: in messages and state dicts; the class's own in snake case unless given.
        scope: what `update` sees: "elementwise": any stretch of a parameter, so that a step runs as one
            compiled kernel; "parameter": the whole array, in its shape, in eager mode.
        wide_weights: whether `update` gets the weights in float32. False, for a rule of scope "parameter": as
            they are stored where nothing more is known of them, which saves a copy.
        last: whether the rule must be the last of its chain, or of what another such rule wraps.
        wrapped_links: how many rules before this one see the float32 weights that it keeps.
        seed: of the words that the rule's moments read; a tuple where they read several (`WordSource`).
        reads_names: whether what it does depends on the name of the parameter.
        measures: whether it has numbers that depend on all gradients at once (`measure`); it is then the
            first of its chain.

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
    wide_weights: ClassVar[bool] = True
    last: ClassVar[bool] = False
    wrapped_links: int = 0
    seed: Any = None
    reads_names: ClassVar[bool] = False
    measures: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def update(self, g: Any, p: Any, n: Any, moments: Any) -> Any:
        """Return the outgoing update, float32, in the shape of `g`.

        Pure. Of `self`, only options are known here; numbers are those of `n`.

        Args:
            g: incoming update, float32; in a rule of scope "parameter" its memory is the rule's to write.
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

    def measure(self, h: Any, gs: Sequence[Tensor]) -> Mapping[str, Any]:
        """Return numbers of a step that depend on all gradients at once, such as their norm.

        Args:
            h: the hyperparameters, by name.
            gs: the gradients of all parameters that the rule touches, in their own dtypes.

        Returns:
            float32 numbers or 0-d tensors, by name, for `update`.
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

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What the rule keeps, by torch's names, its scales apart."""
        return tuple(declared(type(self)).moments)

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
            self._check_unit(self.name, one, fmt, h, found)
        formats = {one.dtype for one in found.moments.values() if one.dtype}
        canonical: dict[str, Any] = {field: group_value(values[field]) for field in formats}
        if self._has("seed"):
            canonical["seed"] = as_seed(self.name, self.seed)
        return dataclasses.replace(self, **canonical)  # pyright: ignore[reportArgumentType]

    def with_seed(self, seed: Any) -> Any:
        """Return the same rule with other random words."""
        return dataclasses.replace(self, seed=seed) if self._has("seed") else self  # pyright: ignore

    def step_numbers(self, h: Any, step: int, gs: Sequence[Tensor] = ()) -> Any:
        """Return the numbers of one step, by name, all float32 values; a decay rate as a `DecayRate`.

        Args:
            h: the hyperparameters, by name.
            step: the count after its increment.
            gs: all gradients, for a rule that measures them.
        """
        numbers: dict[str, Any] = {}
        for field, one in declared(type(self)).hyperparameters.items():
            value = getattr(h, field)
            if isinstance(value, float):
                numbers[field] = DecayRate.of(value) if one.is_rate else value
        numbers.update(self.numbers(h, step))
        if self.measures:
            numbers.update(self.measure(h, gs))
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
            self._check_unit(caller, one, fmt, h, found)
            shape = self._shape(key, one, tuple(info.shape))
            moments.append(one.stored(key, fmt, rounding, rate, shape))
        blank = dict.fromkeys(found.blank)
        return BoundRule(dataclasses.replace(self, **blank), tuple(moments))  # pyright: ignore

    def read_by_bind(self, h: Any) -> tuple:
        """Return what `bind` reads of the hyperparameters: while that stays, so does the bound rule."""
        cls = type(self)
        if cls.acts is not Rule.acts or cls.bind is not Rule.bind:
            return tuple(h)
        found = declared(cls).moments.values()
        return tuple(getattr(h, field) for one in found for field in (one.dtype, one.rate) if field)

    def _check_unit(self, caller: str, one: Moment, fmt: Format | None, h: Any, found: Declared) -> None:
        """Raise ValueError for a moment in units of a root, past what its codes without scales hold."""
        if fmt is None or not fmt.relative or fmt.scaled or not one.unit:
            return
        unit = found.moments[one.unit]
        b1, b2 = (getattr(h, x.rate) if x.rate else 0.0 for x in (one, unit))
        largest = bound(b1, b2)
        if largest > LARGEST_BOUND:
            raise ValueError(
                f"{caller}: {one.dtype} has no scale, and {one.name} reaches {largest:.3g} roots of "
                f"{unit.name} at {found.rate_name(one)}={b1:.7g} and {found.rate_name(unit)}={b2:.7g}. "
                "Use relative(..., block_size=128)."
            )

    def _shape(self, key: str, one: Moment, shape: Shape) -> Shape:
        """Return the shape of a moment of such a parameter."""
        own = one.shape(shape) if one.shape else shape
        if not isinstance(own, tuple) or not all(isinstance(size, int) and size >= 0 for size in own):
            raise ValueError(
                f"{self.name}: the shape of {key} is {own!r} for a parameter of shape {shape}. "
                "Return a tuple of sizes from shape=..."
            )
        return own

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


def _as_float32(value: Any) -> Any:
    return value if isinstance(value, tuple) else float(np.float32(value))


def group_value(fmt: Format | None) -> Format | str | None:
    """Return a format as it stands in a param group: a plain one by its name."""
    return fmt if fmt is None or fmt.scaled or fmt.relative else fmt.dtype
