"""The Adam update rule on one leaf, composed of moments, formats and random words.

Contract: section A. Vectors: adam, no_contraction.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.random_words import Role
from halfstep_spec.rule import RuleState, UpdateRule
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.stored_moment import StoredMoment


@dataclasses.dataclass(frozen=True)
class ScaleByAdam(UpdateRule):
    """Rescale updates by Adam. Arguments as in `optax.scale_by_adam`, plus dtypes, roundings and seed.

    Attributes:
        mu_rounding: "nearest" or "stochastic"; so `nu_rounding`. ("auto" is resolved before: contract F3.)
        bias_correction: False: r1 = r2 = r1' = 1.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    mu_dtype: str | Format = "float32"
    nu_dtype: str | Format = "float32"
    mu_rounding: str = "nearest"
    nu_rounding: str = "stochastic"
    nesterov: bool = False
    seed: int = 0
    bias_correction: bool = dataclasses.field(default=True, metadata={"later": True})

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """Both moments."""
        return {
            "mu": StoredMoment(self.mu_dtype, self.mu_rounding, Role.MU),
            "nu": StoredMoment(self.nu_dtype, self.nu_rounding, Role.NU, positive=True),
        }

    def update(
        self, g: np.ndarray, state: RuleState, leaf: str, p: np.ndarray | None = None
    ) -> tuple[np.ndarray, RuleState]:
        """Return the float32 update and the new state.

        With t = count + 1, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

            m <- store((b1 m) + ((1 - b1) g))
            v <- store((b2 v) + ((1 - b2) (g g)))
            u = (m r1) / (sqrt((v r2) + eps_root) + eps)

        Rounds m and v to their formats, once each; u reads what was stored. With `nesterov`, (m r1) becomes
        (b1 (m r1')) + ((1 - b1) (g r1)), r1' being r1 at t + 1.

        Args:
            g: the incoming update, of any dtype that float32 holds.
            state: of this leaf.
            leaf: its name, for the random words.
            p: not read.
        """
        g, t = np.asarray(g, np.float32), state.count + 1
        mu, nu = self.moments.values()
        m, v = mu.decode(state.moments["mu"]), nu.decode(state.moments["nu"])
        stored = {
            "mu": mu.encode(ema(m, g, self.b1), self.seed, t, leaf),
            "nu": nu.encode(ema(v, g * g, self.b2), self.seed, t, leaf),
        }
        m, v = mu.decode(stored["mu"]), nu.decode(stored["nu"])
        r1, r2, r1_next = self._corrections(t)
        if self.nesterov:
            m_hat = ema(m * r1_next, g * r1, self.b1)
        else:
            m_hat = m * r1
        u = m_hat / (np.sqrt(v * r2 + np.float32(self.eps_root)) + np.float32(self.eps))
        return u, RuleState(t, stored)

    def _corrections(self, t: int) -> tuple[np.float32, np.float32, np.float32]:
        """Return r1, r2 and r1', the reciprocals of the bias corrections."""
        one = np.float32(1)
        if not self.bias_correction:
            return one, one, one
        rates = ((self.b1, t), (self.b2, t), (self.b1, t + 1))
        r1, r2, r1_next = (one / bias_correction(b, count) for b, count in rates)
        return r1, r2, r1_next
