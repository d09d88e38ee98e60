"""The Lion update rule. Contract: A9."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.hyperparameters import decay_rate, pair
from halfstep_torch.numbers.moments import ema
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.storage.formats import Format, as_format
from halfstep_torch.storage.stored_moment import MomentArguments, StoredMoment, group_value

_MU = MomentArguments(Role.MU, "exp_avg", "mu_dtype", "mu_rounding", "b2")


@dataclasses.dataclass(frozen=True)
class LionRule:
    """Lion on one parameter.

    Attributes:
        mu: how the average is stored.
    """

    number_names: ClassVar[tuple[str, ...]] = ("b1", "1 - b1", "b2", "1 - b2")
    mu: StoredMoment

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """The average."""
        return self.mu.arrays

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of the average, if it is rounded stochastically."""
        return self.mu.roles

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return the sign of (b1 m) + ((1 - b1) g) and the stored average (contract A9)."""
        b1, one_minus_b1, b2, one_minus_b2 = numbers
        g, m = u, self.mu.decode(state)
        stored, _ = self.mu.store(ema(m, g, b2, one_minus_b2), words)
        return _sign(ema(m, g, b1, one_minus_b1)), stored


def _sign(x: Tensor) -> Tensor:
    """Return the sign of float32 `x`; unlike `torch.sign`, NaN for NaN and +0 for -0."""
    u = (x > 0).to(torch.float32) - (x < 0).to(torch.float32)
    return torch.where(torch.isnan(x), x, u)


@dataclasses.dataclass(frozen=True)
class ScaleByLion(Link):
    """The transform that `scale_by_lion` returns; its arguments, unchecked."""

    function: ClassVar[str] = "scale_by_lion"
    b1: Any
    b2: Any
    mu_dtype: Any
    mu_rounding: str
    seed: int

    @property
    def entries(self) -> dict[str, Any]:
        """`betas` and the dtype of the average."""
        return {"betas": (self.b1, self.b2), "mu_dtype": self.mu_dtype}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return (b1, b2, mu_dtype)."""
        b1, b2 = pair(function, "betas", group["betas"])
        return (
            decay_rate(function, "betas[0]", b1),
            decay_rate(function, "betas[1]", b2),
            as_format(function, "mu_dtype", group["mu_dtype"], signed=True),
        )

    def rule(self, function: str, values: tuple, weights: Weights) -> LionRule:
        """Resolve format and rounding."""
        _, b2, mu = values
        return LionRule(_MU.stored(function, mu, self.mu_rounding, weights, b2))

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return `LionRule.number_names`, all computed in float32."""
        b1, b2 = map(np.float32, values[:2])
        return tuple(map(float, (b1, np.float32(1) - b1, b2, np.float32(1) - b2)))


def scale_by_lion(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: str | torch.dtype | Format | None = None,
    *,
    mu_rounding: str = "auto",
    seed: Seed = 0,
) -> Link:
    """Replace updates by the sign of their average.

    With m the average as it was stored at the step before:

        u = sign((b1 m) + ((1 - b1) g))
        m <- store((b2 m) + ((1 - b2) g))

    Rounds m to its format, once; u is float32: 1, -1, +0 for zero of either sign, and NaN for NaN.

    Group entries: `betas`, `mu_dtype`. State: `exp_avg`, and of formats with scales `exp_avg_scale`.

    Args:
        b1: rate of the average whose sign is taken.
        b2: decay rate of the average that is kept.
        mu_dtype: how that is stored: "float32", "bfloat16", "float16", a torch dtype, a `scaled` or
            `codebook` format with a sign, or None: bfloat16 for bfloat16 params, else float32.
        mu_rounding: "stochastic", "nearest", "auto" (nearest unless that would freeze the average) or
            "nearest_unchecked".
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: for what is not a number.
        ValueError: for a number out of range, a dtype that holds no moment, or a rounding that freezes it.

    Example:
        >>> scale_by_lion(mu_dtype="bfloat16").function
        'scale_by_lion'

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    Storage and rounding: contract A9, F1 to F3.
    """
    function = "scale_by_lion"
    decay_rate(function, "b1", b1)
    mu = as_format(function, "mu_dtype", mu_dtype, signed=True)
    _MU.check(function, mu, mu_rounding, decay_rate(function, "b2", b2))
    return ScaleByLion(b1, b2, group_value(mu), mu_rounding, as_seed(function, seed))
