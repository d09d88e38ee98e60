"""The Adam update rule on one leaf, composed of moments, formats and random words.

Contract: section A. Vectors: adam, no_contraction.
"""

import dataclasses

import numpy as np

from halfstep_spec.formats import Encoded, Format, as_format
from halfstep_spec.moments import bias_correction, ema
from halfstep_spec.random_words import Role, random_words


@dataclasses.dataclass(frozen=True)
class AdamState:
    """State of one leaf.

    Attributes:
        count: steps taken.
        mu: the first moment, stored.
        nu: the second moment, stored.
    """

    count: int
    mu: Encoded
    nu: Encoded


@dataclasses.dataclass(frozen=True)
class ScaleByAdam:
    """Rescale updates by Adam. Arguments as in `optax.scale_by_adam`, plus dtypes, roundings and seed.

    Attributes:
        mu_rounding: "nearest" or "stochastic"; so `nu_rounding`. ("auto" is resolved before: contract F3.)
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

    def init(self, shape) -> AdamState:
        """Return zero moments."""
        mu, nu = self.formats(shape)
        return AdamState(0, mu.zeros(shape), nu.zeros(shape))

    def formats(self, shape) -> tuple[Format, Format]:
        """Return how the moments of an array of this shape are stored."""
        return as_format(self.mu_dtype).for_shape(shape), as_format(self.nu_dtype).for_shape(shape)

    def update(self, g: np.ndarray, state: AdamState, leaf: str) -> tuple[np.ndarray, AdamState]:
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
        """
        one = np.float32(1)
        g, t = np.asarray(g, np.float32), state.count + 1
        mu_format, nu_format = self.formats(g.shape)
        mu = ema(mu_format.decode(state.mu), g, self.b1)
        nu = ema(nu_format.decode(state.nu), g * g, self.b2)
        mu = mu_format.encode(mu, self._words(self.mu_rounding, t, leaf, Role.MU, g.shape))
        nu = nu_format.encode(nu, self._words(self.nu_rounding, t, leaf, Role.NU, g.shape), positive=True)
        m, v = mu_format.decode(mu), nu_format.decode(nu)
        r1, r2 = one / bias_correction(self.b1, t), one / bias_correction(self.b2, t)
        if self.nesterov:
            r1_next = one / bias_correction(self.b1, t + 1)
            m_hat = ema(m * r1_next, g * r1, self.b1)
        else:
            m_hat = m * r1
        u = m_hat / (np.sqrt(v * r2 + np.float32(self.eps_root)) + np.float32(self.eps))
        return u, AdamState(t, mu, nu)

    def _words(self, rounding: str, step: int, leaf: str, role: Role, shape):
        return random_words(self.seed, step, leaf, role, shape) if rounding == "stochastic" else None
