"""The base of weight storages: the last rule of a chain, which may keep further bits of the weights.

Contract: section P.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.random_words import Role
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.link import Link, ParamInfo, has_field
from halfstep_torch.numbers.exact import is_tame
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.rounding import round_number
from halfstep_torch.storage.state_array import StateArray, WordSource
from halfstep_torch.storage.stored_moment import Arrays, Words


class WeightRule(Link):
    """How weights of 16 bits are stored; float32 weights pass through."""

    last = True

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The state arrays beside 16-bit weights."""
        return tuple(self.extra("bfloat16"))

    def extra(self, dtype: str) -> Mapping[str, StateArray]:
        """Return the state arrays beside weights of a dtype."""
        return {}

    def rounds(self, dtype: str) -> bool:
        """Whether words are drawn for weights of that dtype."""
        return False

    def join(self, p: Tensor, extra: Arrays, dtype: str) -> Tensor:
        """Return the float32 weights of p and the array beside it."""
        return p

    def store(self, w: Tensor, dtype: str, words: Tensor | None) -> tuple[Tensor, Arrays]:
        """Return the model's weights in float32, to nearest without words, and the arrays beside them."""
        return nearest(w, dtype), {}

    def apply(
        self, u: Tensor, p: Tensor, extra: Arrays, dtype: str, words: Tensor | None
    ) -> tuple[Tensor, Arrays]:
        """Return p after an update, and the arrays beside it."""
        return self.store(self.join(p, extra, dtype) + u, dtype, words)

    def bind(self, caller: str, h: Values, info: ParamInfo) -> "BoundWeights | None":
        """Return the rule bound to 16-bit weights, or None for float32."""
        if info.dtype == torch.float32:
            return None
        unknown = {name: None for name in ("seed", "wrapped_links") if has_field(self, name)}
        return BoundWeights(dataclasses.replace(self, **unknown), dtype=dtype_name(info.dtype))


class NearestWeights(WeightRule):
    """Weights rounded to nearest, without extra bits, for a chain without a weight storage."""


class RoundedWeights(WeightRule):
    """Weights rounded by the rule before, without extra bits.

    Attributes:
        by: the name of that rule.
    """

    by: str = ""

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the rule that rounds."""
        return self.by


@dataclasses.dataclass(frozen=True)
class BoundWeights(BoundRule):
    """The storage of weights of one dtype.

    Attributes:
        rule: the way to store them.
        dtype: name of the weights' dtype.
    """

    rule: WeightRule
    dtype: str = "float32"

    @functools.cached_property
    def arrays(self) -> Mapping[str, StateArray]:
        """The state arrays beside the weights."""
        return self.rule.extra(self.dtype)

    @functools.cached_property
    def sources(self) -> tuple[WordSource, ...]:
        """The random words of the weights if they are rounded stochastically."""
        return (WordSource(Role.PARAM),) if self.rule.rounds(self.dtype) else ()

    def update(
        self, u: Tensor, p: Tensor, state: Arrays, numbers: Values, words: Sequence[Words]
    ) -> tuple[Tensor, Arrays]:
        """Return q - p for the weights q from `apply`, or -0.0 if q = p (contract P2)."""
        q, extra = self.apply(u, p, state, words)
        return update_between(p, q), extra

    def apply(self, u: Tensor, p: Tensor, state: Arrays, words: Sequence[Words]) -> tuple[Tensor, Arrays]:
        """Return the new weights, in float32, and the rule's new state arrays."""
        return self.rule.apply(u, p, state, self.dtype, words[0](p.shape) if words else None)

    def join(self, p: Tensor, state: Arrays) -> Tensor:
        """Return the weights with their extra bits, given the model's weights and the state arrays."""
        return self.rule.join(p, state, self.dtype)

    def store(self, w: Tensor) -> tuple[Tensor, Arrays]:
        """Split float32 `w` into the model's weights, still in float32, and the state arrays."""
        return self.rule.store(w, self.dtype, None)


def apply_updates(p: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return nearest(p + u) in `dtype`, the stored weight in every backend (contract P1)."""
    # Here a cast may decide. IEEE 754 and the contract (R2, R5) ask for nearest even, and for infinity past
    # the largest finite value. In compiled code the cast is part of the store.
    return (p + u).to(dtype)


def applied(p: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return p in `dtype` after the update that takes it to q."""
    # Of finite numbers p - (p - q) is the same, if no p is -0.0, which a q of +0.0 would not leave alone.
    if is_tame(q) and p.view(torch.int32).amin().item() > -(2**31):
        return (p - (p - q)).to(dtype)
    return apply_updates(p, update_between(p, q), dtype)


def update_between(p: Tensor, q: Tensor) -> Tensor:
    """Return the update from p to q, which is q - p, or -0.0 for no change (contract P2)."""
    # -0.0 is the one number that moves no weight: neither an infinity nor a zero of either sign.
    return torch.where(q == p, -0.0, q - p)


def nearest(w: Tensor, dtype: str) -> Tensor:
    """Return float32 `w` rounded to nearest in `dtype`, still in float32."""
    return round_number(w, dtype, None, saturate=False)
