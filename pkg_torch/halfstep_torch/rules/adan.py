"""The Adan update rule. Contract: A11."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from halfstep_torch.declarations import decay_rate, moment, number
from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.numbers.moments import bias_correction, ema
from halfstep_torch.rule import Rule


@dataclasses.dataclass(frozen=True)
class ScaleByAdan(Rule):
    """Rescale updates by Adan: Adam with an average of the differences between gradients.

    With t the parameter's step, d the gradient less the last one as it was stored (0 at t = 1), and
    r_i = 1 / (1 - b_i^t):

        grad <- round(g)
        nu <- round((b3 nu) + ((1 - b3) (g + (b2 d))^2))
        mu <- round((b1 mu) + ((1 - b1) g))
        diff <- round((b2 diff) + ((1 - b2) d))
        u = ((mu r1) + (b2 (diff r2))) / (sqrt(nu r3) + eps)

    All in float32, each operation rounded once; u reads what was stored. The four dtypes are as in
    `scale_by_adam`; `mu_rounding` is for diff and grad too. Errors are those of `scale_by_adam`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> p.grad = torch.tensor([3.0, -3.0])
        >>> hs.Optimizer([p], hs.chain(hs.scale_by_adan(), hs.scale_by_learning_rate(0.5))).step()
        >>> p.tolist()
        [0.5, 1.5]

    Source: X. Xie et al., "Adan", arXiv:2208.06677, algorithm 1, with rates written as 1 - b; Optax 0.2.8 has
        1 - b2 for b2 before the difference. Storage and rounding are ours (contract A11, F).
    """

    b1: Any = decay_rate(0.98, "betas[0]")
    b2: Any = decay_rate(0.92, "betas[1]")
    b3: Any = decay_rate(0.99, "betas[2]")
    eps: Any = number(1e-8)
    mu_dtype: Any = None
    diff_dtype: Any = None
    nu_dtype: Any = None
    grad_dtype: Any = None
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    seed: Any = 0
    exp_avg = moment("mu", rate="b1")
    exp_avg_diff = moment("diff", rate="b2", rounding="mu_rounding")
    exp_avg_sq = moment("nu", rate="b3", signed=False)
    last_grad = moment("grad", rounding="mu_rounding")

    def numbers(self, h: Any, step: int) -> Mapping[str, Any]:
        """Return the inverse bias corrections, and 0 at the first step, which has no difference."""
        rates = {"r1": h.b1, "r2": h.b2, "r3": h.b3}
        inverse = {name: np.float32(1) / bias_correction(b, step) for name, b in rates.items()}
        return inverse | {"later": float(step > 1)}

    def update(self, g: Tensor, p: Tensor, n: Any, moments: Any) -> Tensor:
        """Return ((mu r1) + (b2 (diff r2))) / (sqrt(nu r3) + eps), of the averages as stored."""
        mu, diff, nu, grad = moments.exp_avg, moments.exp_avg_diff, moments.exp_avg_sq, moments.last_grad
        d = n.later * (g - grad.value)
        grad.round(g)
        ahead = g + n.b2.b * d
        v = nu.round(ema(nu.value, ahead * ahead, n.b3))
        m = mu.round(ema(mu.value, g, n.b1))
        e = diff.round(ema(diff.value, d, n.b2))
        return ((m * n.r1) + (n.b2.b * (e * n.r2))) / (sqrt(v * n.r3) + n.eps)


scale_by_adan = ScaleByAdan
