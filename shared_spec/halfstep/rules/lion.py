"""Lion (contract A9)."""

from typing import Any

from halfstep.rule import Rule, decay_rate, moment


class ScaleByLion(Rule):
    """The rule of `scale_by_lion`."""

    b1: Any = decay_rate(0.9, torch="betas[0]")
    b2: Any = decay_rate(0.99, torch="betas[1]")
    mu_dtype: Any = None
    mu_rounding: str = "auto"
    seed: Any = 0
    mu = moment(rate="b2", torch="exp_avg")

    def update(self, g, p, n, m, op):
        """Return the sign of the average of rate b1, and keep the average of rate b2."""
        m.mu.round(op.ema(m.mu.value, g, n.b2))
        return op.sign(op.ema(m.mu.value, g, n.b1))
