"""Adam (contract A5, A7, A12)."""

from typing import Any

import numpy as np

from halfstep.rule import Rule, decay_rate, moment, number, option
from halfstep.storage.fourth_roots import FOURTH_ROOT

# Rounding keeps the mean of nu^(1/4), and steps come out a quarter of a per cent long; a second moment
# that is half a per cent larger takes that back.
_SHARE = np.float32(1.005)
_SMALLEST, _ABOVE = FOURTH_ROOT.smallest, FOURTH_ROOT.smallest * np.float32(2.0**-16)


class ScaleByAdam(Rule):
    """The rule of `scale_by_adam`."""

    b1: Any = decay_rate(0.9, torch="betas[0]")
    b2: Any = decay_rate(0.999, torch="betas[1]")
    eps: Any = number(1e-8)
    eps_root: Any = number(0.0)
    mu_dtype: Any = None
    nu_dtype: Any = None
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    nesterov: bool = False
    bias_correction: bool = option(True)
    seed: Any = 0
    mu = moment(rate="b1", unit="nu", torch="exp_avg", linear=True)
    nu = moment(rate="b2", signed=False, torch="exp_avg_sq")

    def numbers(self, h, t, op):
        """Return the inverse bias corrections of this step, and of mu at the next step; and those of A12."""
        rest, smallest = 1 - h.b2, op.maximum(h.eps * h.eps + h.eps_root, _SMALLEST)
        n = {"share": rest * _SHARE, "floor": rest * smallest + _ABOVE}
        if not self.bias_correction:
            return {**n, "r1": 1.0, "r2": 1.0, "r1_next": 1.0, "unbias": 1.0}
        r1, r2, r1_next = op.unbias((h.b1, t), (h.b2, t), (h.b1, t + 1))
        unbias = (1 if self.nesterov else r1) / op.sqrt(r2)
        return {**n, "r1": r1, "r2": r2, "r1_next": r1_next, "unbias": unbias}

    def update(self, g, p, n, m, op):
        """Return (mu r1) / (sqrt((nu r2) + eps_root) + eps), of the averages as stored."""
        if m.nu.has_inverse_root:
            return self._by_inverse_root(g, n, m, op)
        v = m.nu.round(op.ema(m.nu.value, g * g, n.b2))
        mu = m.mu.round(op.ema(m.mu.value, g, n.b1))
        ahead = op.ema(mu * n.r1_next, g * n.r1, n.b1) if self.nesterov else mu * n.r1
        # In one expression, so that eager torch keeps no more arrays than the formula has.
        return ahead / (op.sqrt(v * n.r2 if op.is_zero(self.eps_root) else v * n.r2 + n.eps_root) + n.eps)

    def _by_inverse_root(self, g, n, m, op):
        """Return (mu s) unbias, s about 1 / sqrt(nu), of the averages before they are stored."""
        s = m.nu.inverse_root(n.b2 * m.nu.value + (n.share * (g * g) + n.floor))
        mu = op.ema(m.mu.value, g, n.b1)
        m.mu.round(mu)
        ahead = op.ema(mu * n.r1_next, g * n.r1, n.b1) if self.nesterov else mu
        return (ahead * s) * n.unbias
