"""The Adam update rule, composed of moments, formats and random words. Contract: section A."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.arguments import check_decay_rate, check_not_negative, check_pair
from halfstep_torch.chain import Codes, Link, Update, Words
from halfstep_torch.formats import (
    Format,
    check_format,
    check_rounding,
    resolve_format,
    resolve_rounding,
)
from halfstep_torch.moments import bias_correction, ema
from halfstep_torch.random_words import Role, check_seed


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """Adam on one parameter.

    Attributes:
        mu: format of the first moment.
        nu: format of the second moment.
        mu_stochastic: whether the first is rounded stochastically.
        nu_stochastic: whether the second is.
        nesterov: look one step ahead.
    """

    number_names: ClassVar[tuple[str, ...]] = (
        *("b1", "1 - b1", "b2", "1 - b2"),
        *("r1", "r2", "r1 of the next step"),
        *("eps", "eps_root"),
    )
    mu: Format
    nu: Format
    mu_stochastic: bool
    nu_stochastic: bool
    nesterov: bool

    @property
    def formats(self) -> Mapping[str, Format]:
        """Both moments."""
        return {"exp_avg": self.mu, "exp_avg_sq": self.nu}

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the moments that are rounded stochastically."""
        return (Role.MU,) * self.mu_stochastic + (Role.NU,) * self.nu_stochastic

    def update(self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words) -> Update:
        """Return u = (m r1) / (sqrt((v r2) + eps_root) + eps) and the stored moments (contract A5)."""
        b1, one_minus_b1, b2, one_minus_b2, r1, r2, r1_next, eps, eps_root = numbers
        g = u
        mu = ema(self.mu.decode(codes["exp_avg"]), g, b1, one_minus_b1)
        nu = ema(self.nu.decode(codes["exp_avg_sq"]), g * g, b2, one_minus_b2)
        mu_codes = self.mu.encode(mu, words(Role.MU) if self.mu_stochastic else None)
        nu_codes = self.nu.encode(nu, words(Role.NU) if self.nu_stochastic else None)
        # The update reads what was stored: a step is a function of what a checkpoint holds (contract A7).
        m, v = self.mu.decode(mu_codes), self.nu.decode(nu_codes)
        m_hat = ema(m * r1_next, g * r1, b1, one_minus_b1) if self.nesterov else m * r1
        u = m_hat / (sqrt((v * r2) + eps_root) + eps)
        return u, {"exp_avg": mu_codes, "exp_avg_sq": nu_codes}


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, correctly rounded to float32."""
    # torch's vectorised float32 sqrt on CPU may be off by one bit in eager mode; through float64 it is right,
    # and compiled code emits the machine's own square root, which is right at once.
    if torch.compiler.is_compiling():
        return torch.sqrt(x)
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


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
        b1, b2 = check_pair(function, "betas", group["betas"])
        return (
            check_decay_rate(function, "betas[0]", b1),
            check_decay_rate(function, "betas[1]", b2),
            check_not_negative(function, "eps", group["eps"]),
            check_not_negative(function, "eps_root", group["eps_root"]),
            check_format(function, "mu_dtype", group["mu_dtype"]),
            check_format(function, "nu_dtype", group["nu_dtype"]),
        )

    def rule(self, function: str, values: tuple, dtype: torch.dtype) -> AdamRule:
        """Resolve formats and roundings."""
        b1, b2, _, _, mu_dtype, nu_dtype = values
        mu, nu = resolve_format(mu_dtype, dtype), resolve_format(nu_dtype, dtype)
        mu_stochastic = resolve_rounding(function, "mu", self.mu_rounding, mu, "b1", b1)
        nu_stochastic = resolve_rounding(function, "nu", self.nu_rounding, nu, "b2", b2)
        return AdamRule(mu, nu, mu_stochastic, nu_stochastic, self.nesterov)

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return `AdamRule.number_names`, all computed in float32."""
        one = np.float32(1)
        b1, b2, eps, eps_root = map(np.float32, values[:4])
        r1, r2 = one / bias_correction(b1, step), one / bias_correction(b2, step)
        r1_next = one / bias_correction(b1, step + 1)
        return tuple(map(float, (b1, one - b1, b2, one - b2, r1, r2, r1_next, eps, eps_root)))


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: str | torch.dtype | None = None,
    *,
    nu_dtype: str | torch.dtype | None = None,
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    nesterov: bool = False,
    seed: int | Sequence[int] = 0,
) -> Link:
    """Rescale updates by Adam.

    With t the parameter's step, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

        m <- store((b1 m) + ((1 - b1) g))
        v <- store((b2 v) + ((1 - b2) (g g)))
        u = (m r1) / (sqrt((v r2) + eps_root) + eps)

    Rounds m and v to their formats, once each; u reads what was stored and is float32. With `nesterov`,
    (m r1) becomes (b1 (m r1')) + ((1 - b1) (g r1)), r1' being r1 at t + 1.

    Group entries: `betas`, `eps`, `eps_root`, `mu_dtype`, `nu_dtype`. State: `exp_avg`, `exp_avg_sq`.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added outside the square root.
        eps_root: added inside it.
        mu_dtype: how the first moment is stored: "float32", "bfloat16", "float16", a torch dtype, or None:
            bfloat16 for bfloat16 params, else float32.
        nu_dtype: how the second is stored.
        mu_rounding: "stochastic", "nearest", "auto" (nearest unless that would freeze the moment) or
            "nearest_unchecked".
        nu_rounding: likewise, for the second moment.
        nesterov: use Nesterov momentum.
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
    rates = check_decay_rate(function, "b1", b1), check_decay_rate(function, "b2", b2)
    check_not_negative(function, "eps", eps)
    check_not_negative(function, "eps_root", eps_root)
    dtypes = check_format(function, "mu_dtype", mu_dtype), check_format(function, "nu_dtype", nu_dtype)
    check_rounding(function, "mu_rounding", mu_rounding)
    check_rounding(function, "nu_rounding", nu_rounding)
    if dtypes[0] is not None:
        resolve_rounding(function, "mu", mu_rounding, Format(dtypes[0]), "b1", rates[0])
    if dtypes[1] is not None:
        resolve_rounding(function, "nu", nu_rounding, Format(dtypes[1]), "b2", rates[1])
    seed = check_seed(function, seed)
    return ScaleByAdam(b1, b2, eps, eps_root, *dtypes, mu_rounding, nu_rounding, nesterov, seed)
