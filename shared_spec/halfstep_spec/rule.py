"""The rule protocol: hyperparameters and moments declared once, as fields; the update as arithmetic.

@dataclasses.dataclass(frozen=True)
class ScaleByLion(Rule):
    b1: float = 0.9
    b2: float = 0.99
    mu_dtype: str | Format = "float32"
    mu_rounding: str = "nearest"
    seed: int = 0
    mu: Moment = moment("b2")

    def update(self, g, p, n, moments):
        u = sign(ema(moments.mu.value, g, n.b1))
        moments.mu.round(ema(moments.mu.value, g, n.b2))
        return u
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.numbers.random_words import next_step, role_of
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.storage.formats import Encoded, Format
from halfstep_spec.storage.fourth_root_codes import inverse_root, power_of_root
from halfstep_spec.storage.relative import LARGEST_BOUND, bound, from_unit, to_unit, within_scales
from halfstep_spec.storage.state_dtypes import as_format
from halfstep_spec.storage.stored_moment import StoredMoment

_Shape = tuple[int, ...]


class RuleState(NamedTuple):
    """State of one leaf.

    Attributes:
        count: steps taken.
        moments: the stored arrays, by name.
    """

    count: int
    moments: dict[str, Encoded]


@dataclasses.dataclass(frozen=True)
class Moment:
    """The declaration of a moment by a rule.

    Attributes:
        rate: the hyperparameter that is its decay rate; None where it is no average.
        signed: False for a second moment: a number other than zero is not stored as zero.
        dtype: the argument that holds its format; "" for its name and "_dtype".
        rounding: the argument that holds its rounding; "" for its name and "_rounding".
        shape: of the moment, from that of the weights.
        unit: the second moment whose root may be its unit; "" for none.
        linear: whether the update is linear in it, so that an error of it can be fed back.
        amplified: whether the update magnifies errors of storing it (contract F20).
    """

    rate: str | None
    signed: bool
    dtype: str
    rounding: str
    shape: Callable[[_Shape], _Shape]
    unit: str
    linear: bool
    amplified: bool


def moment(
    rate: str | None = None,
    *,
    signed: bool = True,
    dtype: str = "",
    rounding: str = "",
    shape: Callable[[_Shape], _Shape] = tuple,
    unit: str = "",
    linear: bool = False,
    amplified: bool = False,
) -> Any:
    """Return the field by which a rule declares a moment; the arguments are those of `Moment`."""
    declared = Moment(rate, signed, dtype, rounding, shape, unit, linear, amplified)
    return dataclasses.field(init=False, repr=False, compare=False, default=declared)


class StepMoment:
    """One moment during one step.

    Attributes:
        value: float32, as it was stored at the step before.
        stored: the result of `round`; None before that.
        rounded: its values; None before that.
    """

    def __init__(
        self,
        name: str,
        storage: StoredMoment,
        old: Encoded,
        step: int,
        leaf: str,
        second: "StepMoment | None",
    ):
        self.value, self.stored, self.rounded = storage.decode(old, step - 1, leaf), None, None
        self._name, self._storage, self._step, self._leaf = name, storage, step, leaf
        self._format, self._old, self._second = storage.format(self.value.shape), old, second
        self._unit = second if self._format.relative else None
        if self._unit is not None:
            self.value = self._out_of_unit(self.value, self._unit.value, self._unit._old)

    @property
    def has_inverse_root(self) -> bool:
        """Whether the moment can be rounded by `inverse_root`."""
        return self._format.has_inverse_root

    @property
    def room(self) -> int:
        """The power of two of roots by which an error of one gap of a weight moves the moment at most."""
        if self._format.codes.packed:
            return -1
        return 2 if _is_bounded(self._format) else 4

    def inverse_root(self, x: np.ndarray) -> np.ndarray:
        """Round as `round` does, and return about 1/sqrt(x) of x as it was before (contract F17)."""
        self.round(x)
        return inverse_root(x)

    def round(self, x: np.ndarray) -> np.ndarray:
        """Round float32 `x` to the moment's format, once, and keep the codes.

        Returns the values for the update: the stored ones, or these minus the later effect of their error.
        """
        if self.stored is not None:
            raise ValueError(f"round: {self._name} was rounded before in this step. Round it once.")
        if x.shape != self.value.shape or x.dtype != np.float32:
            raise ValueError(
                f"round: {self._name} became {x.dtype}{x.shape} and is float32{self.value.shape}. "
                "Return it to that, or declare its shape: moment(shape=...)."
            )
        if self._unit is None:
            self.stored, self.rounded = self._storage.round(x, self._step, self._leaf)
            return self._fed_back(x, self.rounded)
        v, nu = self._unit._rounded_before(self._name)
        z = (
            x / power_of_root(nu.codes)
            if self._format.power_unit
            else within_scales(to_unit(x, v), self._format)
        )
        self.stored, z = self._storage.round(z, self._step, self._leaf)
        self.rounded = self._out_of_unit(z, v, nu)
        return self._fed_back(x, self.rounded)

    def _fed_back(self, x: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """Return x - d, where the error of storing x would add d to later updates; or the stored values."""
        if self._storage.rounding != "feedback" or self._format.codes.half_gap == 0:
            return stored
        b = np.float32(self._storage.b)
        most = np.maximum(np.float32(self._step) * np.float32(0.25), np.float32(9))
        d = np.minimum(b / (np.float32(1) - b), most) * (stored - x)
        if self._second is not None:
            most = np.float32(4) * np.sqrt(self._second._rounded_before(self._name)[0])
            d = np.minimum(np.maximum(d, -most), most)
        return x - d

    def _out_of_unit(self, z: np.ndarray, v: np.ndarray, nu: Encoded) -> np.ndarray:
        """Return m, given the second moment and its stored form."""
        return z * power_of_root(nu.codes) if self._format.power_unit else from_unit(z, v)

    def _rounded_before(self, name: str) -> tuple[np.ndarray, Encoded]:
        if self.rounded is None or self.stored is None:
            raise ValueError(f"round: {name} is kept in units of the root of {self._name}. Round that first.")
        return self.rounded, self.stored


class StepWeight:
    """The weight during a step of a rule that rounds it itself: `moments.param`."""

    def __init__(self, p: np.ndarray, dtype: str, words: np.ndarray | None):
        self.value, self._dtype, self._words = p, dtype, words

    def round(self, w: np.ndarray) -> np.ndarray:
        """Return float32 `w`, rounded stochastically to the dtype of the weights; in float32 w itself."""
        return decode(round_to(w, self._dtype, self._words), self._dtype)

    def bound(self, x: Any, gaps: int) -> np.ndarray:
        """Return x, or 2^gaps over the gap between the weight and the next number where this is less."""
        fmt = FLOAT_FORMATS[self._dtype]
        if fmt.bits == 32:
            return np.full_like(self.value, x)
        bits = fmt.mantissa_bits + gaps
        exponents = np.maximum((self.value.view(np.uint32) >> 23) & 255, max(128 - fmt.bias, bits))
        return np.minimum(x, ((254 + bits - exponents) << 23).astype(np.uint32).view(np.float32))


class Moments:
    """The moments of one step, by name: `moments.mu`."""

    def __init__(self, rule: str, moments: Mapping[str, Any]):
        self._rule, self._moments = rule, moments

    def __getattr__(self, name: str) -> StepMoment:
        if name not in self._moments:
            raise AttributeError(
                f"{self._rule}: moment {name} is not declared. Add the field `{name}: Moment = moment()`."
            )
        return self._moments[name]


class Rule:
    """A transform of updates. Subclasses are frozen dataclasses of their hyperparameters and moments.

    Attributes:
        scope: the elements that the update of an element reads: "elementwise", that element; "parameter",
            all of them.
        seed: of the random words.
    """

    scope: ClassVar[str] = "elementwise"
    seed: int = 0

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the float32 update, having rounded each moment once.

        Args:
            g: float32, the incoming update.
            p: float32 weights, as precisely as the step sees them.
            n: the numbers of the step, by name: see `numbers`.
            moments: by name: `moments.mu.value`, `moments.mu.round(x)`.
        """
        raise NotImplementedError

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return numbers that depend on the step, by name.

        Args:
            count: 1 at the first step.
        """
        return {}

    def numbers(self, count: int) -> Any:
        """Return a NamedTuple of float32: the hyperparameters, and the corrections of a step."""
        values = {name: getattr(self, name) for name in self.hyperparameters()}
        values.update(self.corrections(count))
        return _numbers_type(tuple(values))(*map(np.float32, values.values()))

    @classmethod
    def hyperparameters(cls) -> tuple[str, ...]:
        """Return the names of the fields that are numbers."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.type in (float, "float"))  # pyright: ignore

    @classmethod
    def declared(cls) -> dict[str, Moment]:
        """Return the declaration of every moment, by name; raise ValueError if a field is missing."""
        fields = {field.name: field.default for field in dataclasses.fields(cls)}  # pyright: ignore
        moments = {}
        for name, d in fields.items():
            if not isinstance(d, Moment):
                continue
            d = dataclasses.replace(
                d, dtype=d.dtype or f"{name}_dtype", rounding=d.rounding or f"{name}_rounding"
            )
            missing = {d.dtype, d.rounding, *filter(None, (d.rate, d.unit))} - fields.keys()
            if missing:
                raise ValueError(
                    f"{cls.__name__}: moment {name} reads {', '.join(sorted(missing))}, which is no field. "
                    "Declare it, or name another in moment(...)."
                )
            moments[name] = d
        return moments

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """How the moments are stored, by the names that they have in JAX's state."""
        declared = self.declared()
        for name, d in declared.items():
            self._check_format(name, d, declared)
        return {
            name: StoredMoment(
                getattr(self, d.dtype),
                getattr(self, d.rounding),
                role_of(name),
                "never" if d.signed else "always",
                self.seed,
                getattr(self, d.rate) if d.rate else None,
                d.shape,
                d.amplified,
            )
            for name, d in declared.items()
        }

    def _check_format(self, name: str, d: Moment, declared: Mapping[str, Moment]) -> None:
        """Raise ValueError for a format that cannot hold a moment: its sign, its unit or its size."""
        fmt, rule = as_format(getattr(self, d.dtype)), type(self).__name__
        if d.signed and not fmt.codes.signed:
            raise ValueError(
                f"{rule}: {d.dtype}={fmt.dtype} has no sign, and {name} has one. Use it for a second moment."
            )
        second = as_format(getattr(self, declared[d.unit].dtype)) if d.unit else None
        early = second is not None and second.has_inverse_root
        if getattr(self, d.rounding) == "feedback" and (not d.linear or early):
            raise ValueError(
                f"{rule}: {d.rounding} is feedback, and no update is linear in {name}. Use stochastic."
            )
        if fmt.has_inverse_root and not any(
            other.unit == name and _is_bounded(as_format(getattr(self, other.dtype)))
            for other in declared.values()
        ):
            raise ValueError(
                f"{rule}: {d.dtype}={fmt.dtype} stops at its largest number, and no first moment in its "
                'units stops with it. Use mu_dtype=relative("mulaw8"), or scaled("ufloat8_e5m3") here.'
            )
        if fmt.relative and not d.unit:
            raise ValueError(
                f"{rule}: {d.dtype} is relative, and {name} has no second moment. Use scaled(...)."
            )
        if fmt.power_unit and not as_format(getattr(self, declared[d.unit].dtype)).has_inverse_root:
            raise ValueError(
                f"{rule}: {d.dtype} is in units of a power of two that {d.unit} in uroot4_e4m4 gives. "
                f'Use {declared[d.unit].dtype}="uroot4_e4m4", or relative("float8_e3m4").'
            )
        if fmt.relative and not fmt.scaled:
            b1, b2 = (getattr(self, x.rate or "", 0.0) for x in (d, declared[d.unit]))
            largest = bound(b1, b2)
            if largest > LARGEST_BOUND:
                raise ValueError(
                    f"{rule}: {d.dtype} has no scale, and {name} reaches {largest:.3g} roots of {d.unit} at "
                    f"{d.rate}={b1} and {declared[d.unit].rate}={b2}. Use relative(..., block_size=128)."
                )

    def init(self, shape: _Shape) -> RuleState:
        """Return zero moments for weights of a shape."""
        return RuleState(0, {name: m.zeros(m.shape(tuple(shape))) for name, m in self.moments.items()})

    def step(
        self,
        g: np.ndarray,
        state: RuleState,
        leaf: str,
        p: np.ndarray | None = None,
        weight: StepWeight | None = None,
    ) -> tuple[np.ndarray, RuleState]:
        """Return the float32 update and the new state.

        Args:
            g: the incoming update, of any dtype that float32 holds.
            state: of this leaf.
            leaf: its name, for the random words.
            p: float32 values of the weights, for rules that read them.
            weight: how the weights are rounded, for rules that do it themselves.
        """
        g, count, rule = np.asarray(g, np.float32), next_step(state.count), type(self).__name__
        moments: dict[str, StepMoment] = {}
        units = {name: declared.unit for name, declared in self.declared().items()}
        for name, storage in sorted(self.moments.items(), key=lambda item: bool(units.get(item[0]))):
            second = moments.get(units.get(name, ""))
            moments[name] = StepMoment(f"{rule}.{name}", storage, state.moments[name], count, leaf, second)
        given = moments if weight is None else moments | {"param": weight}
        u = self.update(g, p, self.numbers(count), Moments(rule, given))
        if u.shape != g.shape or u.dtype != np.float32:
            raise ValueError(f"{rule}.update: returned {u.dtype}{u.shape}. Return float32{g.shape}, as g is.")
        return u, RuleState(count, {name: _stored(moments[name]) for name in state.moments})


def _is_bounded(fmt: Format) -> bool:
    """Whether a moment in units of another cannot be more than some of these units: it has no scale."""
    return fmt.relative and not fmt.scaled


def _stored(moment: StepMoment) -> Encoded:
    if moment.stored is None:
        raise ValueError(f"{moment._name}: was not rounded in this step. Call `round` once.")
    return moment.stored


@functools.cache
def _numbers_type(names: tuple[str, ...]):
    return collections.namedtuple("Numbers", names)
