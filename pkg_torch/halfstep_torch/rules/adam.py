"""The Adam update rule, composed of moments, formats and random words. Contract: section A."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.numbers import moments as averages
from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.numbers.moments import ema
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.rule import Rule, decay_rate, host_only, moment, number
from halfstep_torch.storage.formats import Format


@dataclasses.dataclass(frozen=True)
class ScaleByAdam(Rule):
    """The transform that `scale_by_adam` returns; its arguments, unchecked."""

    b1: Any = decay_rate(0.9, "betas[0]")
    b2: Any = decay_rate(0.999, "betas[1]")
    eps: Any = number(1e-8)
    eps_root: Any = number(0.0)
    mu_dtype: Any = None
    nu_dtype: Any = None
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    nesterov: bool = False
    bias_correction: bool = host_only(True)
    seed: Any = 0
    exp_avg = moment("mu", rate="b1")
    exp_avg_sq = moment("nu", rate="b2", signed=False)

    def numbers(self, h: Any, step: int) -> Mapping[str, Any]:
        """Return r1, r2 and r1 of the next step: the inverse bias corrections."""
        if not self.bias_correction:
            return {"r1": 1.0, "r2": 1.0, "r1_next": 1.0}
        inverse = lambda b, count: np.float32(1) / averages.bias_correction(b, count)  # noqa: E731
        return {"r1": inverse(h.b1, step), "r2": inverse(h.b2, step), "r1_next": inverse(h.b1, step + 1)}

    def update(self, g: Tensor, p: Tensor, n: Any, moments: Any) -> Tensor:
        """Return u = (m r1) / (sqrt((v r2) + eps_root) + eps), m and v as stored (contract A5, A7)."""
        mu, nu = moments.exp_avg, moments.exp_avg_sq
        v = nu.round(ema(nu.value, g * g, n.b2))
        m = mu.round(ema(mu.value, g, n.b1))
        m_hat = ema(m * n.r1_next, g * n.r1, n.b1) if self.nesterov else m * n.r1
        return m_hat / (sqrt((v * n.r2) + n.eps_root) + n.eps)


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
) -> Rule:
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
        >>> scale_by_adam(b2=0.99, nu_dtype="bfloat16").name
        'scale_by_adam'

    Source: D. Kingma, J. Ba, "Adam", ICLR 2015, algorithm 1; storage and rounding: contract A5, F1 to F3.
    """
    return ScaleByAdam(
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        mu_rounding=mu_rounding,
        nu_rounding=nu_rounding,
        nesterov=nesterov,
        bias_correction=bias_correction,
        seed=seed,
    ).checked()
