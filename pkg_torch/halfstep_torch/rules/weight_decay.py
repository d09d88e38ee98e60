"""Weight decay. Contract: section D."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.hyperparameters import nonnegative
from halfstep_torch.numbers.random_words import Role

Mask = Callable[[str, Tensor], bool]


@dataclasses.dataclass(frozen=True)
class DecayRule:
    """u + (wd p), or u - (wd p).

    Attributes:
        absolute: which of the two.
    """

    arrays: ClassVar[Mapping[str, StateArray]] = {}
    roles: ClassVar[tuple[Role, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = ("weight_decay",)
    absolute: bool

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return u + (wd p): product and sum rounded once each (contract D1)."""
        (weight_decay,) = numbers
        decay = weight_decay * p
        return (u - decay if self.absolute else u + decay), {}


@dataclasses.dataclass(frozen=True)
class AddDecayedWeights(Link):
    """The transform that `add_decayed_weights` returns; its arguments, unchecked."""

    function: ClassVar[str] = "add_decayed_weights"
    weight_decay: Any
    mask: Mask | None = None
    absolute: bool = False

    @property
    def entries(self) -> dict[str, Any]:
        """`weight_decay`."""
        return {"weight_decay": self.weight_decay}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple[float]:
        """Return (weight_decay,)."""
        return (nonnegative(function, "weight_decay", group["weight_decay"]),)

    def applies_to(self, name: str, param: Tensor) -> bool:
        """Ask the mask."""
        return self.mask is None or bool(self.mask(name, param))

    def rule(self, function: str, values: tuple, weights: Weights) -> DecayRule | None:
        """No decay, no rule: 0 times an infinite weight would be NaN."""
        return DecayRule(self.absolute) if values[0] else None

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return the decay."""
        return values


def add_decayed_weights(
    weight_decay: float = 0.0, mask: Mask | None = None, *, absolute: bool = False
) -> Link:
    """Add the decayed weights to the update: u + (weight_decay p), p the weight in float32.

    Rounds product and sum to float32, once each. A decay of 0 leaves the update alone. Before
    `scale_by_adam` it is L2 decay, after it decoupled decay. Group entry: `weight_decay`.

    Args:
        weight_decay: the rate.
        mask: a function of a parameter's leaf name ("layer/weight") and the parameter, asked once, that says
            whether it decays; None: all do. Param groups with `weight_decay=0` do the same.
        absolute: u - (weight_decay p), a decay that the learning rate does not scale: the link then stands
            after `scale_by_learning_rate`.

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: if the decay is not a number, or the mask not a function.
        ValueError: if the decay is negative.

    Example:
        >>> add_decayed_weights(0.1, mask=lambda name, param: param.ndim > 1).entries
        {'weight_decay': 0.1}

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019. Contract D1.
    """
    nonnegative("add_decayed_weights", "weight_decay", weight_decay)
    if mask is not None and not callable(mask):
        raise TypeError(
            f"add_decayed_weights: mask={mask!r} is not a function. "
            "Use one of (name, param), or param groups."
        )
    return AddDecayedWeights(weight_decay, mask, absolute)
