"""Weights with more bits than in the model, which the rules inside read and update.

Contract: P5, P6. `split_params` and `keep_master_params` wrap a whole chain. The rules inside stay links of
one flat chain, before the link that keeps the weights.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfstep.rule import Rule
from halfstep.weights.split_weights import SplitWeight
from halfstep_torch.links.chain import Chain, chain
from halfstep_torch.links.link import checked_rule
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.rounding import round_number
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import Arrays
from halfstep_torch.weights.weight_rule import WeightRule


class SplitParams(WeightRule):
    """The last link in the chain of `split_params`, after the wrapped links."""

    extra_bits: int = 16
    wrapped_links: int = 0
    seed: LinkSeed = 0

    def extra(self, dtype: str) -> Mapping[str, StateArray]:
        """The low bits, stored as int16, because torch supports few operations of uint16."""
        return {"extra_bits": StateArray(torch.uint8 if self.extra_bits == 8 else torch.int16)}

    def rounds(self, dtype: str) -> bool:
        """Whether the two parts together cannot hold float32."""
        return self._split(dtype).rounds

    def join(self, p: Tensor, extra: Arrays, dtype: str) -> Tensor:
        """Return the weight of both parts."""
        bits = p.view(torch.int32) >> 16 if dtype == "bfloat16" else p.half().view(torch.int16).int()
        low = extra["extra_bits"].to(torch.int32) & ((1 << self.extra_bits) - 1)
        return self._split(dtype).join(XP, bits, low)

    def store(self, w: Tensor, dtype: str, words: Tensor | None) -> tuple[Tensor, Arrays]:
        """Return the parts from `SplitWeight`, the first as its number."""
        bits, low = self._split(dtype).split(XP, w, words)
        bits = bits << 16
        # A cast of numbers out of range depends on the machine, so a sign is shifted down.
        half = None if dtype == "bfloat16" else (bits >> 16).to(torch.int16).view(torch.float16)
        shown = bits.view(torch.float32) if half is None else half.to(torch.float32)
        return shown, {"extra_bits": low if self.extra_bits == 8 else (low << 16) >> 16}

    def _split(self, dtype: str) -> SplitWeight:
        return SplitWeight(dtype, self.extra_bits)


class KeepMasterParams(WeightRule):
    """The last link in the chain of `keep_master_params`, after the wrapped links."""

    wrapped_links: int = 0

    def extra(self, dtype: str) -> Mapping[str, StateArray]:
        """A float32 copy of the weights."""
        return {"master": StateArray(torch.float32, copies_weights=True)}

    def join(self, p: Tensor, extra: Arrays, dtype: str) -> Tensor:
        """Return the copy, or p if the copy does not round to p because the weight was changed."""
        master = extra["master"]
        return torch.where(_nearest_away(master, dtype) == p, master, p)

    def store(self, w: Tensor, dtype: str, words: Tensor | None) -> tuple[Tensor, Arrays]:
        """Return w rounded to nearest, ties away from zero, and w (contract P5)."""
        return _nearest_away(w, dtype), {"master": w}


def _nearest_away(w: Tensor, dtype: str) -> Tensor:
    # A word of one half carries if at least half is discarded, so ties go away from zero.
    half = torch.full((), -(1 << 31), dtype=torch.int32, device=w.device)
    return round_number(w, dtype, half, saturate=False)


def split_params(inner: Chain | Rule, extra_bits: int = 16, *, seed: int | Sequence[int] = 0) -> Chain:
    """Store extra low-order bits of each weight, and let `inner` see and update the full value in float32.

    The model's weight p is w rounded to nearest, ties away from zero. The low `extra_bits` of w are stored
    beside it. With bfloat16 and 16 bits, w is the float32 weight, in 4 bytes and without a copy. float32
    weights pass through, and `inner` gets them.

    w + u is rounded to float32 and, if p and the extra bits cannot represent it, stochastically to their
    precision.

    The state of `inner` follows its weights by default: its moments are float32 unless
    `mu_dtype` and `nu_dtype` say otherwise. State: `extra_bits`.

    Args:
        inner: a transform, or a chain of them, with the learning rate.
        extra_bits: 16, or 8 for 24 bits in all.
        seed: seed of the random words, as in `round_stochastically`.

    Returns:
        A chain, for `Optimizer`, or as the last link of a `chain`.

    Raises:
        TypeError: if `inner` is not a transform.
        ValueError: if `extra_bits` is not 8 or 16, or the seed out of range.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = split_params(hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3)), 8)
        >>> [link.name for link in tx.links]
        ['scale_by_adam', 'scale_by_learning_rate', 'split_params']

    Source: TransformerEngine's `store_param_remainders` for 16 bits, the rest ours. Contract P5.
    """
    SplitWeight.check(extra_bits)
    links = chain(inner).links
    last = checked_rule(SplitParams(extra_bits=extra_bits, wrapped_links=len(links), seed=seed))
    return Chain((*links, last))


def keep_master_params(inner: Chain | Rule) -> Chain:
    """Step a float32 copy of the weights by `inner`, and round it for the model.

    The model's weight is the copy rounded to nearest, ties away from zero, as in `split_params` with 16 bits.
    float32 weights pass through, and `inner` gets them. If the model's weight is not the rounded copy, it was
    changed since the last step (loaded, averaged, clamped). The step then continues from the model's weight,
    and the copy is replaced.

    The state of `inner` follows its weights by default: its moments are float32 unless
    `mu_dtype` and `nu_dtype` say otherwise. State: `master`.

    Args:
        inner: a transform, or a chain of them, with the learning rate.

    Returns:
        A chain, for `Optimizer`, or as the last link of a `chain`.

    Raises:
        TypeError: if `inner` is not a transform.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = keep_master_params(hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3)))
        >>> hs.Optimizer([torch.nn.Parameter(torch.ones(2, dtype=torch.float16))], tx).defaults["lr"]
        0.001

    Source: P. Micikevicius et al., ICLR 2018, section 3.1. Contract P5.
    """
    links = chain(inner).links
    return Chain((*links, KeepMasterParams(wrapped_links=len(links))))
