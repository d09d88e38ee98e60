"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P. Vectors: params, weights. Rules that keep more of a weight than the model sees for the
links themselves are in `wide_params.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.numbers.rounding import round_value
from halfstep_torch.numbers.seeds import Seed, as_seed


def apply_updates(p: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return nearest(p + u) in `dtype`: the weight as it is stored, in every backend (contract P1).

    Args:
        p: the weights, float32.
        u: the update, float32.
        dtype: of the weights.
    """
    # Here a cast may decide: nearest even, and infinity past the largest finite value, is what IEEE 754 asks
    # of one, what the contract says (R2, R5), and, in compiled code, part of the store.
    return (p + u).to(dtype)


def landing(p: Tensor, q: Tensor) -> Tensor:
    """Return the update that takes the weight p to q: q - p, and -0.0 where they are equal (contract P2).

    Args:
        p: the weights, float32.
        q: float32 values that the weights' dtype holds.
    """
    # -0.0 is the one number that moves no weight: neither an infinity nor a zero of either sign.
    return torch.where(q == p, -0.0, q - p)


@runtime_checkable
class WeightRule(Protocol):
    """What the rule of a last link is besides: it may know the weights better than the model does."""

    def float32(self, p: Tensor, state: State) -> Tensor:
        """Return the weights as precisely as they are known.

        Args:
            p: the model's weights, in float32.
            state: state arrays of all rules.
        """
        ...

    def store(self, w: Tensor) -> tuple[Tensor, State]:
        """Return the model's weights, in float32, and the state arrays that know `w` best."""
        ...


@dataclasses.dataclass(frozen=True)
class NearestRule:
    """What lands on weights where no link does: nearest, and nothing kept beside them.

    Attributes:
        dtype: name of the weights' dtype.
    """

    dtype: str

    def float32(self, p: Tensor, state: State) -> Tensor:
        """Return p itself."""
        return p

    def store(self, w: Tensor) -> tuple[Tensor, State]:
        """Return nearest(w)."""
        return _nearest(w, self.dtype), {}


@dataclasses.dataclass(frozen=True)
class StochasticRule(NearestRule):
    """The update that lands on a stochastically rounded weight."""

    arrays: ClassVar[Mapping[str, StateArray]] = {}
    roles: ClassVar[tuple[Role, ...]] = (Role.PARAM,)
    number_names: ClassVar[tuple[str, ...]] = ()

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return q - p, q = stochastic(p + u), and -0.0 where q = p (contract P2)."""
        q = round_value(p + u, self.dtype, words(Role.PARAM), saturate=False).to(torch.float32)
        return landing(p, q), {}


@dataclasses.dataclass(frozen=True)
class CompensationRule:
    """Kahan's sum.

    Attributes:
        dtype: name of the weights' dtype.
    """

    arrays: ClassVar[Mapping[str, StateArray]] = {"compensation": StateArray(torch.bfloat16)}
    roles: ClassVar[tuple[Role, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = ()
    dtype: str

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return n - p, n = nearest(p + s), s = u + c; and c = nearest(s - (n - p)) (contract P4)."""
        s = u + state["compensation"].to(torch.float32)
        n = _nearest(p + s, self.dtype)
        return landing(p, n), {"compensation": round_value(s - (n - p), "bfloat16", None, saturate=True)}

    def float32(self, p: Tensor, state: State) -> Tensor:
        """Return p + c."""
        return p + state["compensation"].to(torch.float32)

    def store(self, w: Tensor) -> tuple[Tensor, State]:
        """Return n = nearest(w), and c = nearest(w - n)."""
        n = _nearest(w, self.dtype)
        return n, {"compensation": round_value(w - n, "bfloat16", None, saturate=True)}


def _nearest(w: Tensor, dtype: str) -> Tensor:
    return round_value(w, dtype, None, saturate=False).to(torch.float32)


@dataclasses.dataclass(frozen=True)
class RoundStochastically(Link):
    """The transform that `round_stochastically` returns."""

    function: ClassVar[str] = "round_stochastically"
    last: ClassVar[bool] = True
    seed: int

    def rule(self, function: str, values: tuple, weights: Weights) -> StochasticRule | None:
        """Float32 weights pass through."""
        return None if weights.dtype == torch.float32 else StochasticRule(dtype_name(weights.dtype))


@dataclasses.dataclass(frozen=True)
class Compensate(Link):
    """The transform that `compensate` returns."""

    function: ClassVar[str] = "compensate"
    last: ClassVar[bool] = True

    def rule(self, function: str, values: tuple, weights: Weights) -> CompensationRule | None:
        """Float32 weights pass through."""
        return None if weights.dtype == torch.float32 else CompensationRule(dtype_name(weights.dtype))


def round_stochastically(seed: Seed = 0) -> Link:
    """Land on weights that are rounded stochastically; the last link of a chain.

    q = stochastic(p + u) in the dtype of p; the link emits q - p in float32, and -0.0 where q = p, so that
    nearest(p + u), which is how every weight is stored, gives q. float32 weights pass through.

    Rounds p + u to float32, then to the dtype of p: away from zero in magnitude with a probability of the
    discarded fraction, so that updates far below the spacing of the weights arrive on average.

    Args:
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: if the seed is not an integer or a pair.
        ValueError: if it is out of range.

    Example:
        >>> round_stochastically(seed=7).seed
        7

    Source: contract P2, P3, R3.
    """
    return RoundStochastically(as_seed("round_stochastically", seed))


def compensate() -> Link:
    """Keep what rounding the weights has lost, in bfloat16, and add it to the next update (Kahan's sum).

    s = u + c, n = nearest(p + s); c becomes nearest(s - (n - p)), and the link emits n - p, or -0.0 where
    n = p. float32 weights pass through.

    Rounds p + s to the dtype of p, and what that loses to bfloat16: 8 bits more than the weights have. An
    update under about 2^-9 of the compensation, so 2^-17 of the weight, can be lost all the same.

    State: `compensation`.

    Returns:
        A transform, for `chain` and `Optimizer`; the last link.

    Example:
        >>> compensate().function
        'compensate'

    Source: W. Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; for bfloat16 weights
        P. Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192, section 4. Contract P4.
    """
    return Compensate()
