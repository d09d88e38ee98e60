"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from halfstep_torch.chain import Codes, Link, Update, Words
from halfstep_torch.float_formats import dtype_name
from halfstep_torch.formats import Format
from halfstep_torch.random_words import Role
from halfstep_torch.rounding import round_value
from halfstep_torch.seeds import Seed, as_seed


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


@dataclasses.dataclass(frozen=True)
class LandingRule:
    """The update that lands on a stochastically rounded weight.

    Attributes:
        dtype: name of the weights' dtype.
    """

    formats: ClassVar[Mapping[str, Format]] = {}
    roles: ClassVar[tuple[Role, ...]] = (Role.PARAM,)
    number_names: ClassVar[tuple[str, ...]] = ()
    dtype: str

    def update(self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words) -> Update:
        """Return q - p, q = stochastic(p + u), and -0.0 where q = p (contract P2)."""
        q = round_value(p + u, self.dtype, words(Role.PARAM), saturate=False).to(torch.float32)
        # -0.0 is the one number that moves no weight: neither an infinity nor a zero of either sign.
        return torch.where(q == p, -0.0, q - p), {}


@dataclasses.dataclass(frozen=True)
class RoundStochastically(Link):
    """The transform that `round_stochastically` returns."""

    function: ClassVar[str] = "round_stochastically"
    last: ClassVar[bool] = True
    seed: int

    def rule(self, function: str, values: tuple, dtype: torch.dtype) -> LandingRule | None:
        """Float32 weights pass through."""
        return None if dtype == torch.float32 else LandingRule(dtype_name(dtype))


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
