"""Weight decay (contract D1)."""

from typing import Any

from halfstep.rule import Rule, number


class AddDecayedWeights(Rule):
    """The rule of `add_decayed_weights`."""

    reads_params = "the link adds weight_decay * params"

    weight_decay: Any = number(0.0, schedule=True)
    absolute: bool = False

    def update(self, g, p, n, m, op):
        """Return u + (weight_decay p), or u - (weight_decay p)."""
        if op.is_zero(self.weight_decay):
            return g
        decay = n.weight_decay * p
        return g - decay if self.absolute else g + decay
