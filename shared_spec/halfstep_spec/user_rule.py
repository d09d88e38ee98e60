"""Golden vectors for a rule of a user's own: its declarations and arithmetic, with the storage of the spec.

The user's file imports `halfstep`, and the spec does not. It reads declarations by the names of the rule's
attributes, runs `update` on NumPy arrays, and rounds moments itself.
"""

import dataclasses
import importlib.util
import itertools
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case, storage_clauses
from halfstep_spec.numbers.global_norm import global_norm, norm_in_range
from halfstep_spec.numbers.means import mean
from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import Moment, Rule
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.state_dtypes import codebook, scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "ways to store moments and weights",
    "Special": "gradients that are infinite, NaN, zero of either sign, or next to the largest float",
}

_DECLARATION = "halfstep"
"""The key of a field's declaration in its metadata."""
_SHAPE, _SIZE = (4, 6), 24
_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
_FORMATS: Any = (
    (("float32", "float32"), ""),
    (("bfloat16", "bfloat16"), ""),
    ((scaled("float8_e4m3fn", **_SMALL), scaled("ufloat8_e5m3", **_SMALL)), ""),
    ((codebook("dynamic8", **_SMALL), codebook("udynamic8", **_SMALL)), ""),
    (("bfloat16", "bfloat16"), relative("int8", **_SMALL)),
)
"""Of moments with a sign, without one, and in units of the root of another."""
_STORAGES = (
    ("float32", "nearest"),
    ("bfloat16", "stochastic"),
    ("bfloat16", "split16"),
    ("bfloat16", "compensated"),
    ("bfloat16", "stochastic"),
)


class NumpyOp:
    """The operations for `update` and `numbers`: on float32 arrays, each rounded once."""

    ema, mean = staticmethod(ema), staticmethod(mean)
    sqrt, abs, sign, isfinite = np.sqrt, np.abs, np.sign, np.isfinite
    maximum, minimum = np.maximum, np.minimum

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"op.{name} rounds as a framework does, and has no golden bits. Write it with operators and "
            "op.sqrt, op.where and the like, or use check_rule of both packages."
        )

    def where(self, mask: np.ndarray, x: Any, y: Any) -> np.ndarray:
        """Return x where a comparison holds, else y."""
        return np.where(mask, np.float32(x), np.float32(y))

    def clamp(self, x: Any, low: Any, high: Any) -> Any:
        """Return minimum(maximum(x, low), high)."""
        return np.minimum(np.maximum(x, low), high)

    def norm(self, x: np.ndarray, exact: bool = False) -> np.float32:
        """Return the norm by sums of integers (contract N2)."""
        return global_norm([x], exact=True) if exact else self.__getattr__("norm(x) without exact=True")

    def norm_in_range(self, x: np.ndarray, exact: bool = False) -> tuple[np.float32, np.float32]:
        """Return the norm of s x by sums of integers, and s (contract N3)."""
        self.norm(x[:0], exact)
        return norm_in_range(x, exact=True)

    def scaled(self, x: np.ndarray, ratio: Any, scale: Any = 1) -> np.ndarray:
        """Return ratio (scale x)."""
        return ratio * (np.float32(scale) * x)

    def is_zero(self, field: Any) -> bool:
        """Whether a field of the rule is 0."""
        return field == 0

    def unbias(self, *pairs: tuple[Any, int]) -> tuple[np.float32, ...]:
        """Return 1 / (1 - rate^t) of each pair (rate, t) (contract M2)."""
        return tuple(np.float32(1) / bias_correction(rate, t) for rate, t in pairs)

    def float32(self, x: Any) -> np.float32:
        """Return a count, or the truth of a comparison, as a number."""
        return np.float32(x)


OP = NumpyOp()


def cases_of(theirs: type) -> Iterator[Case]:
    """Return the cases of a rule: five steps over formats and weight storages, and gradients out of range."""
    kind = rule_of(theirs)
    for ((signed, unsigned), units), (dtype, storage) in zip(_FORMATS, _STORAGES, strict=True):
        if units and not any(moment.unit for moment in kind.declared().values()):
            continue
        step = Step(_stored(kind, signed, unsigned, units), 0.1, "decoupled", dtype, storage)
        g = reals("user's gradients", 5 * _SIZE, (-5, 1)).reshape(5, *_SHAPE)
        try:
            with np.errstate(under="raise"):  # contract A8
                yield _case(step, g, storage, ("Grid",), ("A1", "F3", "W6", *storage_clauses(step)))
        except FloatingPointError as error:
            raise ValueError(
                f"{theirs.__name__}: a result is subnormal where gradients are 1e-5 to 10. Frameworks take "
                "it for zero. Give its numbers other defaults, or form smaller powers."
            ) from error
    inf, nan = float("inf"), float("nan")
    special = np.array([0, -0.0, inf, -inf, nan, 3e38, -3e38, 1, -1, 1e4, 1e-3, 2], np.float32)
    g = reals("user's special gradients", 2 * _SIZE, (-4, 0)).reshape(2, *_SHAPE)
    g[0].reshape(-1)[: special.size] = special
    step = Step(_stored(kind, "bfloat16", "bfloat16", ""), 0.0, "decoupled", "bfloat16")
    yield _case(step, g, "special gradients, then ordinary ones", ("Special",), ("A1", "R6"))


def _stored(kind: type[Rule], signed: Any, unsigned: Any, in_units: Any) -> Rule:
    """Return a rule with moments in given formats."""
    formats = {
        d.dtype: in_units if in_units and d.unit else signed if d.signed else unsigned
        for d in kind.declared().values()
    }
    return kind(**formats)


def _case(step: Step, g: np.ndarray, comment: str, flags: tuple[str, ...], clauses: tuple[str, ...]) -> Case:
    p = round_to(reals("user's weights", _SIZE, (-4, 0)).reshape(_SHAPE), step.param_dtype)
    comment = f"{comment}: {step.param_dtype} weights, {describe(step.rule)}"
    return step_case(step, comment, p, g, None, 1e-3, flags, clauses)


def classes_of(path: pathlib.Path) -> list[type]:
    """Return the rules that a Python file defines."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"generate: {path} is no Python file. Pass one that defines a rule.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == path.stem]
    rules = [
        x for x in classes if dataclasses.is_dataclass(x) and hasattr(x, "update") and hasattr(x, "scope")
    ]
    if not rules:
        raise ValueError(f"generate: {path} defines no rule. Derive a class from halfstep.Rule in it.")
    return rules


def rule_of(theirs: Any) -> type[Rule]:
    """Return the rule of the spec that computes as a user's class declares."""
    fields = dataclasses.fields(theirs)
    declared = {f.name: f.metadata.get(_DECLARATION) for f in fields}
    moments = _moments(theirs, set(declared))
    typed = []
    for field in fields:
        number = declared[field.name]
        default = number.none if number is not None and field.default is None else field.default
        if default is dataclasses.MISSING:
            raise ValueError(
                f"{theirs.__name__}: {field.name} has no default. Give it one, which the vectors take."
            )
        typed.append((field.name, Any if number is None else float, dataclasses.field(default=default)))
    # A module's name is the name of the op that its cases ask.
    members = {moment.rounding: "auto" for moment in moments.values() if moment.rounding not in declared}
    members |= {"__module__": theirs.name, "theirs": theirs, "scope": theirs.scope, "own_moments": moments}
    return dataclasses.make_dataclass(
        theirs.__name__, typed, bases=(_UserRule,), namespace=members, frozen=True
    )


class _UserRule(Rule):
    """Base of the rules that `rule_of` makes: it asks the user's class for everything."""

    theirs: ClassVar[Any]
    own_moments: ClassVar[dict[str, Moment]]

    @classmethod
    def declared(cls) -> dict[str, Moment]:
        """Return the declarations of the user's class."""
        return cls.own_moments

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the user's numbers of a step."""
        values = {name: np.float32(getattr(self, name)) for name in self.hyperparameters()}
        return self._theirs().numbers(types.SimpleNamespace(**values), count, OP)

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the user's update."""
        return self._theirs().update(g, p, n, moments, OP)

    def _theirs(self) -> Any:
        return self.theirs(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self.theirs)})


def _moments(theirs: type, fields: set[str]) -> dict[str, Moment]:
    """Return the moments that a class declares, in the form of the spec."""
    declared: dict[str, Moment] = {}
    for name, d in itertools.chain.from_iterable(vars(base).items() for base in reversed(theirs.__mro__)):
        if not all(hasattr(d, attribute) for attribute in ("rate", "signed", "rounding", "unit")):
            continue
        dtype, rounding = d.dtype or f"{name}_dtype", d.rounding or f"{name}_rounding"
        if dtype not in fields:
            raise ValueError(
                f"{theirs.__name__}: the moment {name} has no field for its format, and vectors name it. "
                f"Declare {dtype}: str | None = None."
            )
        linear, amplified = d.errors == "linear", d.errors == "amplified"
        shape = d.shape or tuple
        declared[name] = Moment(d.rate or None, d.signed, dtype, rounding, shape, d.unit, linear, amplified)
    return declared
