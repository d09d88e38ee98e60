"""Momentum, as an update rule on one leaf. Contract: A10. Vectors: trace."""

import dataclasses

import numpy as np

from halfstep_spec.numbers.random_words import Role
from halfstep_spec.rule import RuleState, UpdateRule
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.stored_moment import StoredMoment


@dataclasses.dataclass(frozen=True)
class Trace(UpdateRule):
    """A decaying sum of the gradients. Arguments as in `optax.trace`, plus rounding and seed.

    Attributes:
        rounding: "nearest" or "stochastic". ("auto" is resolved before, by `decay`: contract F3.)
    """

    decay: float = 0.9
    nesterov: bool = False
    accumulator_dtype: str | Format = "float32"
    rounding: str = "nearest"
    seed: int = 0

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """The sum."""
        return {"trace": StoredMoment(self.accumulator_dtype, self.rounding, Role.MU)}

    def update(
        self, g: np.ndarray, state: RuleState, leaf: str, p: np.ndarray | None = None
    ) -> tuple[np.ndarray, RuleState]:
        """Return the float32 update and the new state.

            t <- store(g + (decay t))
            u = t, as it was stored; with `nesterov` g + (decay t)

        Rounds t to its format, once.

        Args:
            g: the incoming update, of any dtype that float32 holds.
            state: of this leaf.
            leaf: its name, for the random words.
            p: not read.
        """
        g, step, decay = np.asarray(g, np.float32), state.count + 1, np.float32(self.decay)
        trace = self.moments["trace"]
        total = g + decay * trace.decode(state.moments["trace"])
        stored = trace.encode(total, self.seed, step, leaf)
        u = trace.decode(stored)
        return g + decay * u if self.nesterov else u, RuleState(step, {"trace": stored})
