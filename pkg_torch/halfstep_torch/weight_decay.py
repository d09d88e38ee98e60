"""Weight decay. Contract: section D."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from halfstep_torch.arguments import check_not_negative, float32_number
from halfstep_torch.chain import Codes, Link, Words

Mask = Callable[[str, Tensor], bool]


@dataclasses.dataclass(frozen=True)
class DecayRule:
    """u + (wd p), or u - (wd p)."""

    absolute: bool
    formats = {}
    roles = ()

    def update(
        self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words
    ) -> tuple[Tensor, Codes]:
        """Return u + (wd p): product and sum rounded once each (contract D1)."""
        (weight_decay,) = numbers
        decay = weight_decay * p
        return (u - decay if self.absolute else u + decay), {}


@dataclasses.dataclass(frozen=True)
class AddDecayedWeights(Link):
    """The transform that `add_decayed_weights` returns."""

    weight_decay: float = 0.0
    mask: Mask | None = None
    absolute: bool = False

    @property
    def function(self) -> str:
        """The public name."""
        return "add_decayed_weights"

    @property
    def entries(self) -> dict[str, Any]:
        """`weight_decay`."""
        return {"weight_decay": self.weight_decay}

    def check(self, function: str, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Check that the decay is not negative."""
        check_not_negative(function, "weight_decay", group["weight_decay"])

    def rule(self, group: Mapping[str, Any], name: str, param: Tensor) -> DecayRule | None:
        """No decay, no rule: a weight that is infinite must not become NaN by 0 times infinity."""
        if group["weight_decay"] == 0 or not (self.mask is None or self.mask(name, param)):
            return None
        return DecayRule(self.absolute)

    def numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        """Return the decay."""
        return (float32_number(self.function, "weight_decay", group["weight_decay"]),)


def add_decayed_weights(
    weight_decay: float = 0.0, mask: Mask | None = None, *, absolute: bool = False
) -> Link:
    """Add the decayed weights to the update: u + (weight_decay p), p the weight in float32.

    Rounds product and sum to float32, once each. A decay of 0 leaves the update alone. Group entry: `weight_decay`.

    Args:
        weight_decay: the rate.
        mask: a function of a parameter's leaf name ("layer/weight") and the parameter that says whether it decays;
            None: all do. Param groups with `weight_decay=0` do the same.
        absolute: u - (weight_decay p): a decay that the learning rate does not scale; the link then stands after
            `scale_by_learning_rate`.

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: if the decay is not a number.
        ValueError: if it is negative.

    Example:
        >>> add_decayed_weights(0.1, mask=lambda name, param: param.ndim > 1).entries
        {'weight_decay': 0.1}

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019. Contract D1.
    """
    check_not_negative("add_decayed_weights", "weight_decay", weight_decay)
    return AddDecayedWeights(weight_decay, mask, absolute)
