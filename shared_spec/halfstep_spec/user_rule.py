"""Golden vectors for a rule of a user's own: its declarations and arithmetic, with the storage of the spec.

The user's file imports `halfstep`, and the spec does not: it reads what a rule declares by the names of its
attributes, runs `update` on NumPy arrays, and rounds moments itself.
"""

import dataclasses
import importlib.util
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case, storage_clauses
from halfstep_spec.numbers.global_norm import global_norm
from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import Moment, Rule
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "ways to store moments and weights",
    "Special": "gradients that are infinite, NaN, zero of either sign, or next to the largest float",
}

_DECLARATION = "halfstep"
"""Where a field's metadata has what the field declares."""
_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}


class NumpyOp:
    """What `update` and `numbers` are given: operations on float32 arrays, each rounded once."""

    ema = staticmethod(ema)
    sqrt, abs, sign, isfinite = np.sqrt, np.abs, np.sign, np.isfinite
    maximum, minimum = np.maximum, np.minimum

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"op.{name} rounds as a framework does, and has no golden bits. Write it with operators, op.sqrt, "
            "op.where and the like, or hold the frameworks against each other by check_rule."
        )

    def where(self, mask: np.ndarray, x: Any, y: Any) -> np.ndarray:
        """Return x where a comparison holds, else y."""
        return np.where(mask, np.float32(x), np.float32(y))

    def clamp(self, x: Any, low: Any, high: Any) -> Any:
        """Return minimum(maximum(x, low), high)."""
        return np.minimum(np.maximum(x, low), high)

    def norm(self, x: np.ndarray, exact: bool = False) -> np.float32:
        """Return the norm by sums of integers (contract N2)."""
        return global_norm([x]) if exact else self.__getattr__("norm(x) without exact=True")

    def scaled(self, x: np.ndarray, ratio: Any) -> np.ndarray:
        """Return ratio x."""
        return ratio * x

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


def rule_of(theirs: type) -> type[Rule]:
    """Return the rule of the spec that computes what a class of a user's declares.

    Raises:
        ValueError: if a field has no default, or a moment no field for its format.
    """
    fields: Any = dataclasses.fields(theirs)
    numbers = {f.name for f in fields if f.metadata.get(_DECLARATION) is not None}
    bare = [f.name for f in fields if f.default is dataclasses.MISSING]
    if bare:
        raise ValueError(f"{theirs.__name__}: {bare[0]} has no default. Give it one, which the vectors take.")
    moments = _moments(theirs, {f.name for f in fields})

    def declared(cls) -> dict[str, Moment]:
        return moments

    def computed(self: Any) -> Any:
        return theirs(**{f.name: getattr(self, f.name) for f in fields})

    def corrections(self: Any, count: int) -> Mapping[str, Any]:
        h = {name: np.float32(getattr(self, name)) for name in numbers}
        return computed(self).numbers(_Named(h), count, OP)

    def update(self: Any, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        return computed(self).update(g, p, n, moments, OP)

    members = {
        "declared": classmethod(declared),
        "corrections": corrections,
        "update": update,
        "scope": theirs.scope,  # pyright: ignore[reportAttributeAccessIssue]
        "__module__": theirs.name,  # pyright: ignore[reportAttributeAccessIssue]  # the op of its cases
        "__doc__": theirs.__doc__,
    }
    typed = [(f.name, float if f.name in numbers else Any, dataclasses.field(default=f.default)) for f in fields]
    return dataclasses.make_dataclass(theirs.__name__, typed, bases=(Rule,), namespace=members, frozen=True)


class _Named:
    """The hyperparameters of a step, by name."""

    def __init__(self, values: Mapping[str, Any]):
        self.__dict__.update(values)


def _moments(theirs: type, fields: set[str]) -> dict[str, Moment]:
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
        declared[name] = Moment(d.rate or None, d.signed, dtype, rounding, d.shape or tuple, d.unit)
    return declared
