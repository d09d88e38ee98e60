"""The Lion update rule on one leaf. Contract: A9. Vectors: lion."""

import dataclasses

import numpy as np

from halfstep_spec.numbers.moments import ema
from halfstep_spec.numbers.random_words import Role
from halfstep_spec.rule import RuleState, UpdateRule
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.stored_moment import StoredMoment


@dataclasses.dataclass(frozen=True)
class ScaleByLion(UpdateRule):
    """The sign of an average of the gradients. Arguments as in `optax.scale_by_lion`, plus rounding and seed.

    Attributes:
        mu_rounding: "nearest" or "stochastic". ("auto" is resolved before, by b2: contract F3.)
    """

    b1: float = 0.9
    b2: float = 0.99
    mu_dtype: str | Format = "float32"
    mu_rounding: str = "nearest"
    seed: int = 0

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """The average of rate b2."""
        return {"mu": StoredMoment(self.mu_dtype, self.mu_rounding, Role.MU)}

    def update(
        self, g: np.ndarray, state: RuleState, leaf: str, p: np.ndarray | None = None
    ) -> tuple[np.ndarray, RuleState]:
        """Return the float32 update and the new state; m is what was stored at the step before.

            u = sign((b1 m) + ((1 - b1) g))
            m <- store((b2 m) + ((1 - b2) g))

        Rounds m to its format, once. The sign of zero, of either sign, is +0, that of NaN is NaN.

        Args:
            g: the incoming update, of any dtype that float32 holds.
            state: of this leaf.
            leaf: its name, for the random words.
            p: not read.
        """
        g, t = np.asarray(g, np.float32), state.count + 1
        mu = self.moments["mu"]
        m = mu.decode(state.moments["mu"])
        u = sign(ema(m, g, self.b1))
        return u, RuleState(t, {"mu": mu.encode(ema(m, g, self.b2), self.seed, t, leaf)})


def sign(x: np.ndarray) -> np.ndarray:
    """Return 1, -1, +0 for zero of either sign, and NaN for NaN."""
    u = (x > 0).astype(np.float32) - (x < 0).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), u)
