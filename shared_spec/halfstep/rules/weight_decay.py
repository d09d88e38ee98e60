"""Weight decay (contract D1, D3)."""

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, number


class AddDecayedWeights(Rule):
    """The rule of `add_decayed_weights`."""

    reads_params = "the link adds weight_decay * params"

    weight_decay: Scalar = number(0.0, schedule=True)
    absolute: bool = False
    cautious: bool = False

    def __post_init__(self) -> None:
        """Raise an error if `cautious` is not a bool."""
        if not isinstance(self.cautious, bool):
            raise TypeError(
                f"add_decayed_weights: cautious={self.cautious!r} is not a bool. Use True or False."
            )

    def update(self, g, p, n, m, op):
        """Return u + (weight_decay p), or u - (weight_decay p), or u if a cautious decay would oppose it."""
        if op.is_zero(self.weight_decay):
            return g
        decay = n.weight_decay * p
        decayed = g - decay if self.absolute else g + decay
        if not self.cautious:
            return decayed
        # Signs are compared, because the product of an update and a weight may underflow to 0.
        alike, unlike = (g > 0) & (p > 0) | (g < 0) & (p < 0), (g > 0) & (p < 0) | (g < 0) & (p > 0)
        return op.where(alike if self.absolute else unlike, g, decayed)
