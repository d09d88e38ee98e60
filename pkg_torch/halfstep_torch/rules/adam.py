"""The Adam update rule, composed of moments, formats and random words. Contract: section A."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import Link, State, StateArray, Update, Weights, Words
from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.numbers.hyperparameters import decay_rate, nonnegative, pair
from halfstep_torch.numbers.moments import bias_correction, ema
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.storage.formats import Format, as_format
from halfstep_torch.storage.stored_moment import MomentArguments, StoredMoment, group_value

_MU = MomentArguments(Role.MU, "exp_avg", "mu_dtype", "mu_rounding", "b1")
_NU = MomentArguments(Role.NU, "exp_avg_sq", "nu_dtype", "nu_rounding", "b2")


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """Adam on one parameter.

    Attributes:
        mu: how the first moment is stored.
        nu: how the second is.
        nesterov: look one step ahead.
    """

    number_names: ClassVar[tuple[str, ...]] = (
        *("b1", "1 - b1", "b2", "1 - b2"),
        *("r1", "r2", "r1 of the next step"),
        *("eps", "eps_root"),
    )
    mu: StoredMoment
    nu: StoredMoment
    nesterov: bool

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """Both moments."""
        return {**self.mu.arrays, **self.nu.arrays}

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the moments that are rounded stochastically."""
        return self.mu.roles + self.nu.roles

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return u = (m r1) / (sqrt((v r2) + eps_root) + eps) and the stored moments (contract A5)."""
        b1, one_minus_b1, b2, one_minus_b2, r1, r2, r1_next, eps, eps_root = numbers
        g = u
        mu = ema(self.mu.decode(state), g, b1, one_minus_b1)
        nu = ema(self.nu.decode(state), g * g, b2, one_minus_b2)
        # The update reads what was stored: a step is a function of what a checkpoint holds (contract A7).
        (mus, m), (nus, v) = self.mu.store(mu, words), self.nu.store(nu, words)
        m_hat = ema(m * r1_next, g * r1, b1, one_minus_b1) if self.nesterov else m * r1
        u = m_hat / (sqrt((v * r2) + eps_root) + eps)
        return u, {**mus, **nus}


@dataclasses.dataclass(frozen=True)
class ScaleByAdam(Link):
    """The transform that `scale_by_adam` returns; its arguments, unchecked."""

    function: ClassVar[str] = "scale_by_adam"
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    mu_dtype: Any
    nu_dtype: Any
    mu_rounding: str
    nu_rounding: str
    nesterov: bool
    seed: int
    bias_correction: bool = True

    @property
    def entries(self) -> dict[str, Any]:
        """`betas`, `eps`, `eps_root` and the dtypes of the moments."""
        return {
            "betas": (self.b1, self.b2),
            "eps": self.eps,
            "eps_root": self.eps_root,
            "mu_dtype": self.mu_dtype,
            "nu_dtype": self.nu_dtype,
        }

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return (b1, b2, eps, eps_root, mu_dtype, nu_dtype)."""
        b1, b2 = pair(function, "betas", group["betas"])
        return (
            decay_rate(function, "betas[0]", b1),
            decay_rate(function, "betas[1]", b2),
            nonnegative(function, "eps", group["eps"]),
            nonnegative(function, "eps_root", group["eps_root"]),
            as_format(function, "mu_dtype", group["mu_dtype"], signed=True),
            as_format(function, "nu_dtype", group["nu_dtype"]),
        )

    def rule(self, function: str, values: tuple, weights: Weights) -> AdamRule:
        """Resolve formats and roundings."""
        b1, b2, _, _, mu, nu = values
        mu = _MU.stored(function, mu, self.mu_rounding, weights, b1)
        nu = _NU.stored(function, nu, self.nu_rounding, weights, b2)
        return AdamRule(mu, nu, self.nesterov)

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return `AdamRule.number_names`, all computed in float32."""
        one = np.float32(1)
        b1, b2, eps, eps_root = map(np.float32, values[:4])
        if self.bias_correction:
            r1, r2 = one / bias_correction(b1, step), one / bias_correction(b2, step)
            r1_next = one / bias_correction(b1, step + 1)
        else:
            r1, r2, r1_next = one, one, one
        return tuple(map(float, (b1, one - b1, b2, one - b2, r1, r2, r1_next, eps, eps_root)))


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: str | torch.dtype | Format | None = None,
    *,
    nu_dtype: str | torch.dtype | Format | None = None,
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    nesterov: bool = False,
    bias_correction: bool = True,
    seed: Seed = 0,
) -> Link:
    """Rescale updates by Adam.

    With t the parameter's step, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

        m <- store((b1 m) + ((1 - b1) g))
        v <- store((b2 v) + ((1 - b2) (g g)))
        u = (m r1) / (sqrt((v r2) + eps_root) + eps)

    Rounds m and v to their formats, once each; u reads what was stored and is float32. With `nesterov`,
    (m r1) becomes (b1 (m r1')) + ((1 - b1) (g r1)), r1' being r1 at t + 1.

    Group entries: `betas`, `eps`, `eps_root`, `mu_dtype`, `nu_dtype`. State: `exp_avg`, `exp_avg_sq`, and
    of formats with scales `exp_avg_scale`, `exp_avg_sq_scale`.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added outside the square root.
        eps_root: added inside it.
        mu_dtype: how the first moment is stored: "float32", "bfloat16", "float16", a torch dtype, a `scaled`
            format with a sign, or None: bfloat16 for bfloat16 params, else float32.
        nu_dtype: how the second is stored: any of these, a `scaled` or `codebook` format without a sign, or
            "ufloat8_e6m2".
        mu_rounding: "stochastic", "nearest", "auto" (nearest unless that would freeze the moment) or
            "nearest_unchecked".
        nu_rounding: likewise, for the second moment.
        nesterov: use Nesterov momentum.
        bias_correction: False leaves the averages as they are: r1 = r2 = 1.
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: for what is not a number.
        ValueError: for a number out of range, a dtype that holds no moment, or a rounding that freezes it.

    Example:
        >>> scale_by_adam(b2=0.99, nu_dtype="bfloat16").function
        'scale_by_adam'

    Source: D. Kingma, J. Ba, "Adam", ICLR 2015, algorithm 1; storage and rounding: contract A5, F1 to F3.
    """
    function = "scale_by_adam"
    rates = decay_rate(function, "b1", b1), decay_rate(function, "b2", b2)
    nonnegative(function, "eps", eps)
    nonnegative(function, "eps_root", eps_root)
    mu, nu = as_format(function, "mu_dtype", mu_dtype, signed=True), as_format(function, "nu_dtype", nu_dtype)
    _MU.check(function, mu, mu_rounding, rates[0])
    _NU.check(function, nu, nu_rounding, rates[1])
    seed = as_seed(function, seed)
    moments = (group_value(mu), group_value(nu), mu_rounding, nu_rounding)
    return ScaleByAdam(b1, b2, eps, eps_root, *moments, nesterov, seed, bias_correction)
