"""Weight decay. Contract: section D."""

from collections.abc import Callable

from torch import Tensor

import halfstep.rules.weight_decay as shared
from halfstep.hyperparameters import Values
from halfstep.rule import Rule, option
from halfstep_torch.links.link import Link, ParamInfo, checked_rule

Mask = Callable[[str, Tensor], bool]


class AddDecayedWeights(shared.AddDecayedWeights, Link):
    """The rule of `add_decayed_weights`, with a mask of parameters."""

    mask: Mask | None = option(None)

    def touches(self, name: str, param: Tensor) -> bool:
        """Whether the mask selects the parameter."""
        return self.mask is None or bool(self.mask(name, param))

    def is_noop(self, h: Values, info: ParamInfo) -> bool:
        """Whether there is no decay: 0 times an infinite weight would be NaN."""
        return h.weight_decay == 0


def add_decayed_weights(
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    *,
    absolute: bool = False,
    cautious: bool = False,
) -> Rule:
    """Add the decay to the update: u + (weight_decay p), p the weight in float32.

    Rounds product and sum to float32, once each. A decay of 0 does not change the update. Before
    `scale_by_adam` it is L2 decay, after it decoupled decay. Group entry: `weight_decay`.

    Args:
        weight_decay: the rate.
        mask: a function of a parameter's leaf name ("layer/weight") and the parameter, called once, that
            returns whether it decays. With None all decay. Param groups with `weight_decay=0` are an
            alternative.
        absolute: u - (weight_decay p), a decay not scaled by the learning rate, for a link after
            `scale_by_learning_rate`.
        cautious: decay a weight only if its step does not move it away from 0, by the signs of both.

    Raises:
        TypeError: if the decay is not a number, or the mask not a function.
        ValueError: if the decay is negative.

    Example:
        >>> add_decayed_weights(0.1, mask=lambda name, param: param.ndim > 1).entries
        {'weight_decay': 0.1}

    Source: I. Loshchilov and F. Hutter, ICLR 2019; for `cautious` L. Chen et al., 2025. Contract D1, D3.
    """
    tx = checked_rule(AddDecayedWeights(weight_decay, absolute, cautious, mask))
    if mask is not None and not callable(mask):
        raise TypeError(
            f"add_decayed_weights: mask={mask!r} is not a function. "
            "Use a function of (name, param), or param groups."
        )
    return tx
