"""Narrow weight storages: stochastic rounding, and Kahan compensation.

Contract: section P. Vectors: params, weights. `wide_weights.py` has storages with float32 weights for the
rules inside.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.rule import Rule
from halfstep.weights.compensation import compensation_of, compensation_of_step
from halfstep_torch.links.link import checked_rule
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.rounding import round_number, round_value
from halfstep_torch.numbers.seeds import LinkSeed, Seed
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import Arrays
from halfstep_torch.weights.weight_rule import WeightRule, nearest


class RoundStochastically(WeightRule):
    """The transform of `round_stochastically`."""

    seed: LinkSeed = 0

    def rounds(self, dtype: str) -> bool:
        """Always."""
        return True

    def store(self, w: Tensor, dtype: str, words: Tensor | None) -> tuple[Tensor, Arrays]:
        """Return stochastic(w), or nearest(w) without words."""
        return round_number(w, dtype, words, saturate=False, quiet=words is not None), {}


class Compensate(WeightRule):
    """The transform of `compensate`."""

    def extra(self, dtype: str) -> Mapping[str, StateArray]:
        """The rounding error of the weight."""
        return {"compensation": StateArray(torch.bfloat16)}

    def join(self, p: Tensor, extra: Arrays, dtype: str) -> Tensor:
        """Return p + c, with c only if it belongs to p."""
        return p + compensation_of(XP, extra["compensation"].to(torch.float32), p, dtype)

    def store(self, w: Tensor, dtype: str, words: Tensor | None) -> tuple[Tensor, Arrays]:
        """Return n = nearest(w), and c = nearest(w - n)."""
        n = nearest(w, dtype)
        return n, {"compensation": round_value(w - n, "bfloat16", None, saturate=True)}

    def apply(
        self, u: Tensor, p: Tensor, extra: Arrays, dtype: str, words: Tensor | None
    ) -> tuple[Tensor, Arrays]:
        """Return the step of `compensate` (contract P4)."""
        s = u + compensation_of_step(XP, extra["compensation"].to(torch.float32), p, u, dtype)
        n = nearest(p + s, dtype)
        return n, {"compensation": round_value(s - (n - p), "bfloat16", None, saturate=True)}


def round_stochastically(seed: Seed = 0) -> Rule:
    """Round the new weights, q = stochastic(p + u), in the dtype of p: for the end of a chain.

    The link emits q - p in float32, or -0.0 for no change, and every weight is stored as nearest(p + u),
    which then is q. float32 weights pass through.

    Rounds twice: p + u to float32, and that to p's dtype, away from zero in magnitude with the discarded
    fraction as probability. So updates far below the spacing of the weights arrive on average.

    Args:
        seed: of the random words; a number below 2^64, or its halves (high, low).

    Raises:
        TypeError: if the seed is not an integer or a pair.
        ValueError: if it is out of range.

    Example:
        >>> round_stochastically(seed=7).seed
        7

    Source: contract P2, P3, R3.
    """
    return checked_rule(RoundStochastically(seed=seed))


def compensate() -> Rule:
    """Keep Kahan's compensation of each weight, in bfloat16, and add it to the update that follows.

    With c the rounding error so far: s = u + c, n = nearest(p + s); c becomes nearest(s - (n - p)). The link
    emits n - p, or -0.0 for no change. A c above half a unit in the last place of p counts as 0: it is the
    error of the weight that was there before p was set. float32 weights pass through.

    Rounds p + s to the dtype of p, and the error to bfloat16: 8 bits more than the weights have. The
    rounding error of c is lost, which sets the limit. c grows to about 2^-8 of the weight, and parts under
    2^-9 of c can vanish. Updates are applied to within 2 % from 2^-12 of the weight on. Updates under about
    2^-17 may stall, and updates below 2^-18 do.

    State: `compensation`.

    Returns:
        A transform, for `chain` and `Optimizer`; the last link.

    Example:
        >>> compensate().name
        'compensate'

    Source: W. Kahan, 1965; P. Zamirai et al., arXiv:2010.06192, for bfloat16 weights. Contract P4.
    """
    return Compensate()
