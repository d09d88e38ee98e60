"""Weights kept to more bits than the model sees, which the links inside read and update.

Contract: P5, P6. Two ways to keep them, `split_params` and `keep_master_params`: wrappers of a whole chain.
The links that one wraps stay links of the one flat chain, in front of that which keeps the weights.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from halfstep_torch.chain import Chain, Link, State, StateArray, Update, Weights, Words, chain
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.numbers.seeds import as_seed
from halfstep_torch.weights.params import landing
from halfstep_torch.weights.split_weights import SplitWeight, nearest_away


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """A weight in two parts.

    Attributes:
        split: how they make one.
    """

    number_names: ClassVar[tuple[str, ...]] = ()
    split: SplitWeight

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """The low bits."""
        return {"extra_bits": StateArray(self.split.extra_dtype)}

    @property
    def roles(self) -> tuple[Role, ...]:
        """Words round what the two parts cannot hold."""
        return (Role.PARAM,) if self.split.rounds else ()

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return p' - p and the low bits, of w + u rounded to the wider format (contract P5)."""
        w = self.float32(p, state) + u
        shown, extra = self.split.split(w, words(Role.PARAM) if self.split.rounds else None)
        return landing(p, shown), {"extra_bits": extra}

    def float32(self, p: Tensor, state: State) -> Tensor:
        """Return the weight of both parts."""
        return self.split.join(p, state["extra_bits"])

    def store(self, w: Tensor) -> tuple[Tensor, State]:
        """Return both parts of w, rounded to nearest where they cannot hold it."""
        shown, extra = self.split.split(w, None)
        return shown, {"extra_bits": extra}


@dataclasses.dataclass(frozen=True)
class MasterRule:
    """A float32 copy of the weights.

    Attributes:
        dtype: name of the weights' dtype.
    """

    arrays: ClassVar[Mapping[str, StateArray]] = {"master": StateArray(torch.float32, copies_weights=True)}
    roles: ClassVar[tuple[Role, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = ()
    dtype: str

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return p' - p and w + u, p' being w + u rounded to nearest, ties away from zero (contract P5)."""
        w = state["master"] + u
        return landing(p, nearest_away(w, self.dtype)), {"master": w}

    def float32(self, p: Tensor, state: State) -> Tensor:
        """Return the copy."""
        return state["master"]

    def store(self, w: Tensor) -> tuple[Tensor, State]:
        """Return w to nearest, ties away from zero, and w."""
        return nearest_away(w, self.dtype), {"master": w}


@dataclasses.dataclass(frozen=True)
class SplitParams(Link):
    """The last link of what `split_params` returns; those that it wraps stand before it."""

    function: ClassVar[str] = "split_params"
    last: ClassVar[bool] = True
    extra_bits: int
    wraps: int
    seed: int

    def rule(self, function: str, values: tuple, weights: Weights) -> SplitRule | None:
        """Float32 weights pass through."""
        if weights.dtype == torch.float32:
            return None
        return SplitRule(SplitWeight(dtype_name(weights.dtype), self.extra_bits))


@dataclasses.dataclass(frozen=True)
class KeepMasterParams(Link):
    """The last link of what `keep_master_params` returns; those that it wraps stand before it."""

    function: ClassVar[str] = "keep_master_params"
    last: ClassVar[bool] = True
    wraps: int

    def rule(self, function: str, values: tuple, weights: Weights) -> MasterRule | None:
        """Float32 weights pass through."""
        return None if weights.dtype == torch.float32 else MasterRule(dtype_name(weights.dtype))


def split_params(inner: Chain | Link, extra_bits: int = 16, *, seed: int | Sequence[int] = 0) -> Chain:
    """Keep further mantissa bits of the weights beside them, and let `inner` see both as one float32 weight.

    The model's weight p is the nearest to w, ties away from zero; the low `extra_bits` of w are kept beside
    it. bfloat16 and 16 bits are float32 itself, in 4 bytes and without a copy: training gives float32's
    weights, rounded. float32 weights pass through, and `inner` sees them.

    Rounds w + u to float32 and, where p and the bits cannot hold that, stochastically to what they can.

    What `inner` keeps by default follows the weights that it sees: its moments are float32 unless
    `mu_dtype` and `nu_dtype` say otherwise. State: `extra_bits`.

    Args:
        inner: a transform, or a chain of them, with the learning rate.
        extra_bits: 16, or 8 for 24 bits in all.
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A chain, for `Optimizer`, or to stand last in a `chain`.

    Raises:
        TypeError: if `inner` is not a transform.
        ValueError: if `extra_bits` is not 8 or 16, or the seed out of range.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = split_params(hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3)), 8)
        >>> [link.function for link in tx.links]
        ['scale_by_adam', 'scale_by_learning_rate', 'split_params']

    Source: TransformerEngine's `store_param_remainders`, for 16 bits; the rest ours. Contract P5.
    """
    if isinstance(extra_bits, bool) or extra_bits not in (8, 16):
        raise ValueError(
            f"split_params: extra_bits={extra_bits!r} is not 8 or 16. "
            "Use 16 for all of float32, 8 for 24 bits in all."
        )
    links = chain(inner).links
    return Chain((*links, SplitParams(extra_bits, len(links), as_seed("split_params", seed))))


def keep_master_params(inner: Chain | Link) -> Chain:
    """Keep a float32 copy of the weights, step it by `inner`, and round it for the model.

    The model's weight is the copy rounded to nearest, ties away from zero: the same as `split_params` of 16
    bits gives. Rounds nothing else. float32 weights pass through, and `inner` sees them.

    What `inner` keeps by default follows the weights that it sees: its moments are float32 unless
    `mu_dtype` and `nu_dtype` say otherwise. State: `master`.

    Args:
        inner: a transform, or a chain of them, with the learning rate.

    Returns:
        A chain, for `Optimizer`, or to stand last in a `chain`.

    Raises:
        TypeError: if `inner` is not a transform.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = keep_master_params(hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3)))
        >>> hs.Optimizer([torch.nn.Parameter(torch.ones(2, dtype=torch.float16))], tx).defaults["lr"]
        0.001

    Source: P. Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1. Contract P5.
    """
    links = chain(inner).links
    return Chain((*links, KeepMasterParams(len(links))))
