"""State of another transform, kept in a format: decode it, run the transform, encode it. Contract: section S.

Vectors: store_state.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.random_words import Role
from halfstep_spec.rule import RuleState, UpdateRule
from halfstep_spec.storage.formats import Encoded, Format, as_format
from halfstep_spec.storage.stored_moment import StoredMoment


@dataclasses.dataclass(frozen=True)
class ChosenArray(StoredMoment):
    """A state array of another rule: stored in a format, or, where that is not for its shape, left alone.

    Attributes:
        inner: how the rule itself stores it: plain.
    """

    inner: StoredMoment = dataclasses.field(kw_only=True)

    def chosen(self, shape) -> bool:
        """Whether an array of this shape is stored: it has an axis, and the format is not for larger ones."""
        small = as_format(self.dtype).for_shape(shape) != as_format(self.dtype)
        return len(shape) > 0 and not small

    def format(self, shape) -> Format:
        """Return how the array is stored."""
        return super().format(shape) if self.chosen(shape) else self.inner.format(shape)

    def encode(self, moment: np.ndarray, seed: int, step: int, leaf: str) -> Encoded:
        """Round to the format; of one without a sign, the magnitudes."""
        unsigned = not self.format(moment.shape).signed
        return super().encode(np.abs(moment) if unsigned else moment, seed, step, leaf)


@dataclasses.dataclass(frozen=True)
class StoreState(UpdateRule):
    """Keep the state arrays of `rule` in a format.

    Attributes:
        rule: whose moments are plain.
        dtype: of the stored arrays.
        rounding: "stochastic" or "nearest".
        select: names of the moments that are stored; None for all.
    """

    rule: UpdateRule
    dtype: str | Format = "bfloat16"
    rounding: str = "stochastic"
    select: tuple[str, ...] | None = None
    seed: int = 0

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """What the rule keeps, as it is stored here."""
        return {
            name: ChosenArray(self.dtype, self.rounding, Role.STATE, None, inner=inner)
            if self.select is None or name in self.select
            else inner
            for name, inner in self.rule.moments.items()
        }

    def update(
        self, g: np.ndarray, state: RuleState, leaf: str, p: np.ndarray | None = None
    ) -> tuple[np.ndarray, RuleState]:
        """Return the update of `rule` and the new state: `rule`'s own, encoded.

        Rounds what is decoded to the dtype in which `rule` keeps it, and what `rule` made to the format. The
        words are those of the array's own name, such as "mu/w" for the leaf "w".

        Args:
            g: the incoming update.
            state: of this leaf.
            leaf: its name.
            p: float32 values of the weights.
        """
        inner_state = dict(state.moments)
        chosen = [
            (name, moment)
            for name, moment in self.moments.items()
            if isinstance(moment, ChosenArray) and moment.chosen(g.shape)
        ]
        for name, moment in chosen:
            values = moment.decode(state.moments[name])
            inner_state[name] = moment.inner.format(g.shape).encode(values, None)
        u, new = self.rule.update(g, RuleState(state.count, inner_state), leaf, p)
        stored: dict[str, Encoded] = dict(new.moments)
        for name, moment in chosen:
            values = moment.inner.decode(new.moments[name])
            stored[name] = moment.encode(values, self.seed, new.count, f"{name}/{leaf}")
        return u, RuleState(new.count, stored)
