"""Momentum (contract A10)."""

from typing import Any

from halfstep.hyperparameters import check_decay_rate
from halfstep.rule import Rule, moment, number


class Trace(Rule):
    """The rule of `trace`."""

    decay: Any = number(torch="momentum", check=check_decay_rate)
    nesterov: bool = False
    accumulator_dtype: Any = None
    rounding: str = "auto"
    seed: Any = 0
    trace = moment(
        rate="decay",
        dtype="accumulator_dtype",
        rounding="rounding",
        torch="momentum_buffer",
        linear=True,
    )

    def update(self, g, p, n, m, op):
        """Return the sum g + (decay trace) as stored, or the sum one step ahead of it."""
        t = m.trace.round(g + n.decay * m.trace.value)
        return g + n.decay * t if self.nesterov else t
