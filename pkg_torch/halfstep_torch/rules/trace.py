"""Momentum. Contract: A10."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.hyperparameters import decay_rate
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.storage.formats import Format, as_format
from halfstep_torch.storage.stored_moment import MomentArguments, StoredMoment, group_value

_TRACE = MomentArguments(Role.MU, "momentum_buffer", "accumulator_dtype", "rounding", "decay")
_MOMENTUM = dataclasses.replace(_TRACE, rate="momentum")


@dataclasses.dataclass(frozen=True)
class TraceRule:
    """Momentum on one parameter.

    Attributes:
        trace: how the sum is stored.
        nesterov: look one step ahead.
    """

    number_names: ClassVar[tuple[str, ...]] = ("decay",)
    trace: StoredMoment
    nesterov: bool

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """The sum."""
        return self.trace.arrays

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of the sum, if it is rounded stochastically."""
        return self.trace.roles

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return t as it was stored, t <- store(g + (decay t)), or g + (decay t) (contract A10)."""
        (decay,) = numbers
        g = u
        stored, u = self.trace.store(g + (decay * self.trace.decode(state)), words)
        return g + (decay * u) if self.nesterov else u, stored


@dataclasses.dataclass(frozen=True)
class Trace(Link):
    """The transform that `trace` returns; its arguments, unchecked.

    Attributes:
        without_zero: a momentum of 0 keeps no sum.
    """

    function: ClassVar[str] = "trace"
    decay: Any
    nesterov: bool
    accumulator_dtype: Any
    rounding: str
    seed: int
    without_zero: bool = False

    @property
    def entries(self) -> dict[str, Any]:
        """`momentum` and the dtype of the sum."""
        return {"momentum": self.decay, "accumulator_dtype": self.accumulator_dtype}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return (momentum, accumulator_dtype)."""
        return (
            decay_rate(function, "momentum", group["momentum"]),
            as_format(function, "accumulator_dtype", group["accumulator_dtype"], signed=True),
        )

    def rule(self, function: str, values: tuple, weights: Weights) -> TraceRule | None:
        """Resolve format and rounding."""
        momentum, fmt = values
        if self.without_zero and momentum == 0:
            return None
        return TraceRule(_MOMENTUM.stored(function, fmt, self.rounding, weights, momentum), self.nesterov)

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return the momentum."""
        return values[:1]


def trace(
    decay: float,
    nesterov: bool = False,
    accumulator_dtype: str | torch.dtype | Format | None = None,
    *,
    rounding: str = "auto",
    seed: Seed = 0,
) -> Link:
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
    function = "trace"
    fmt = as_format(function, "accumulator_dtype", accumulator_dtype, signed=True)
    _TRACE.check(function, fmt, rounding, decay_rate(function, "decay", decay))
    return Trace(decay, nesterov, group_value(fmt), rounding, as_seed(function, seed))
