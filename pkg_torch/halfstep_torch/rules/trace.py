"""Momentum. Contract: A10."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.numbers import hyperparameters
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.rule import ParamInfo, Rule, host_only, moment, number
from halfstep_torch.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class Trace(Rule):
    """The transform that `trace` returns; its arguments, unchecked.

    Attributes:
        without_zero: a momentum of 0 keeps no sum.
    """

    decay: Any = number(entry="momentum", check=hyperparameters.decay_rate)
    nesterov: bool = False
    accumulator_dtype: Any = None
    rounding: str = "auto"
    seed: Any = 0
    without_zero: bool = host_only(False)
    momentum_buffer = moment("trace", rate="decay", dtype="accumulator_dtype", rounding="rounding")

    def acts(self, h: Any, info: ParamInfo) -> bool:
        """Whether there is a sum to keep."""
        return not (self.without_zero and h.decay == 0)

    def update(self, g: Tensor, p: Tensor, n: Any, moments: Any) -> Tensor:
        """Return t as it was stored, t <- store(g + (decay t)), or g + (decay t) (contract A10)."""
        trace = moments.momentum_buffer
        t = trace.round(g + (n.decay * trace.value))
        return g + (n.decay * t) if self.nesterov else t


def trace(
    decay: float,
    nesterov: bool = False,
    accumulator_dtype: str | torch.dtype | Format | None = None,
    *,
    rounding: str = "auto",
    seed: Seed = 0,
) -> Rule:
    """Replace updates by their decaying sum: momentum.

        t <- store(g + (decay t))
        u = t, as it was stored; with `nesterov` g + (decay t)

    Rounds t to its format, once; u is float32.

    Group entries: `momentum`, `accumulator_dtype`. State: `momentum_buffer`, and of formats with scales
    `momentum_buffer_scale`.

    Args:
        decay: of the sum.
        nesterov: look one step ahead.
        accumulator_dtype: how the sum is stored: "float32", "bfloat16", "float16", a torch dtype, a `scaled`
            format with a sign, or None: bfloat16 for bfloat16 params, else float32.
        rounding: "stochastic", "nearest", "auto" (nearest unless that would freeze the sum) or
            "nearest_unchecked".
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: for what is not a number.
        ValueError: for a number out of range, a dtype that holds no moment, or a rounding that freezes it.

    Example:
        >>> trace(0.9).entries
        {'momentum': 0.9, 'accumulator_dtype': None}

    Source: B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; I. Sutskever
    et al., "On the importance of initialization and momentum in deep learning", ICML 2013, for `nesterov`.
    Storage and rounding: contract A10, F1 to F3.
    """
    return Trace(
        decay=decay,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        rounding=rounding,
        seed=seed,
    ).checked()
