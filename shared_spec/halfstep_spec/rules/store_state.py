"""State of another transform, kept in a format: decode it, run the transform, encode it. Contract: section S.

Vectors: store_state.
"""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.numbers.random_words import Role
from halfstep_spec.rule import Rule
from halfstep_spec.storage.formats import Encoded, Format
from halfstep_spec.storage.state_dtypes import as_format
from halfstep_spec.storage.stored_moment import StoredMoment


@dataclasses.dataclass(frozen=True)
class _ChosenArray(StoredMoment):
    """A state array of another rule: stored in a format, or, where that is not for its shape, left alone.

    Attributes:
        name: of the array; its words follow this and the leaf's name, such as "mu/w".
        inner: how the rule itself stores it: plain.
    """

    name: str = dataclasses.field(kw_only=True)
    inner: StoredMoment = dataclasses.field(kw_only=True)

    def chosen(self, shape) -> bool:
        """Whether an array of this shape is stored: it has an axis, and the format is not for larger ones."""
        small = as_format(self.dtype).for_shape(shape) != as_format(self.dtype)
        return len(shape) > 0 and not small

    def format(self, shape) -> Format:
        """Return how the array is stored."""
        return super().format(shape) if self.chosen(shape) else self.inner.format(shape)

    def decode(self, stored: Encoded, step: int, leaf: str) -> np.ndarray:
        """Return the values that the rule reads: rounded to the dtype in which it keeps the array."""
        values = super().decode(stored, step, leaf)
        plain = self.inner.format(stored.array_shape)
        return plain.decode(plain.encode(values, None))

    def round(self, moment: np.ndarray, step: int, leaf: str) -> tuple[Encoded, np.ndarray]:
        """Round as the rule does, which goes on with that, and then to the format; without a sign, |x|."""
        stored, values = self.inner.round(moment, step, leaf)
        if self.chosen(moment.shape):
            signed = self.format(moment.shape).codes.signed
            stored, _ = super().round(values if signed else np.abs(values), step, f"{self.name}/{leaf}")
        return stored, values


@dataclasses.dataclass(frozen=True)
class StoreState(Rule):
    """Keep the state arrays of `rule` in a format.

    Attributes:
        rule: a rule with plain moments.
        dtype: of the stored arrays.
        rounding: "stochastic" or "nearest".
        select: names of the moments that are stored; None for all.
    """

    rule: Rule
    dtype: str | Format = "bfloat16"
    rounding: str = "stochastic"
    select: tuple[str, ...] | None = None
    seed: int = 0

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """The arrays of the rule, as they are stored here."""
        chosen = self.rule.moments.keys() if self.select is None else self.select
        return {
            name: self._stored(name, inner) if name in chosen else inner
            for name, inner in self.rule.moments.items()
        }

    def numbers(self, count: int) -> Any:
        """Return the numbers of the rule."""
        return self.rule.numbers(count)

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return the update of the rule: from its arrays before they are stored (contract S2)."""
        return self.rule.update(g, p, n, moments)

    def _stored(self, name: str, inner: StoredMoment) -> _ChosenArray:
        return _ChosenArray(
            self.dtype,
            self.rounding,
            Role.STATE,
            "where_nonnegative",
            self.seed,
            shape=inner.shape,
            name=name,
            inner=inner,
        )
