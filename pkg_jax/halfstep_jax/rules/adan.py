"""The Adan update rule as an Optax transform. Contract: A11."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from halfstep_jax.numbers.exact import add_product, opaque
from halfstep_jax.numbers.moments import bias_correction, ema
from halfstep_jax.numbers.roots import divide, sqrt
from halfstep_jax.rule import Rule, decay_rate, moment, number
from halfstep_jax.transform import transform_of


@dataclasses.dataclass(frozen=True)
class ScaleByAdan(Rule):
    """Rescale updates by Adan: Adam with an average of the differences between gradients.

    With t = count + 1, d the gradient less the last one as it was stored (0 at t = 1), r_i = 1 / (1 - b_i^t):

        grad <- round(g)
        nu <- round((b3 nu) + ((1 - b3) (g + (b2 d))^2))
        mu <- round((b1 mu) + ((1 - b1) g))
        diff <- round((b2 diff) + ((1 - b2) d))
        u = ((mu r1) + (b2 (diff r2))) / (sqrt(nu r3) + eps)

    All in float32, each operation rounded once; u reads what was stored. The four dtypes are as in
    `scale_by_adam`; `mu_rounding` is for diff and grad too. Errors are those of `scale_by_adam`.

    Example:
        >>> params = {"w": jnp.array([1.0, -2.0], jnp.bfloat16)}
        >>> tx = scale_by_adan(nu_dtype="bfloat16")
        >>> updates, state = tx.update({"w": jnp.array([0.5, -0.5])}, tx.init(params))
        >>> print(updates["w"].dtype, state.diff["w"].dtype)
        float32 bfloat16

    Source: X. Xie et al., "Adan", arXiv:2208.06677, algorithm 1, with rates written as 1 - b; Optax 0.2.8 has
        1 - b2 for b2 before the difference. Storage and rounding are ours (contract A11, F).
    """

    name = "scale_by_adan"
    b1: Any = decay_rate(0.98)
    b2: Any = decay_rate(0.92)
    b3: Any = decay_rate(0.99)
    eps: Any = number(1e-8)
    mu_dtype: Any = None
    diff_dtype: Any = None
    nu_dtype: Any = None
    grad_dtype: Any = None
    mu_rounding: str = "auto"
    nu_rounding: str = "stochastic"
    seed: Any = 0
    mu = moment(rate="b1")
    diff = moment(rate="b2", rounding="mu_rounding")
    nu = moment(rate="b3", signed=False)
    grad = moment(rounding="mu_rounding")

    def numbers(self, h, count) -> dict[str, Any]:
        """Return reciprocals of the bias corrections, and 0 at the first step, which has no difference."""
        rates = jnp.stack([jnp.asarray(b) for b in (h.b1, h.b2, h.b3)])
        r1, r2, r3 = divide(jnp.ones(3), bias_correction(rates, jnp.full(3, count)))
        return {"r1": r1, "r2": r2, "r3": r3, "later": (count > 1).astype(jnp.float32)}

    def update(self, g, p, n, moments, zero):
        """Return the quotient of the averages, as they are stored from now on."""
        d = n.later * (g - moments.grad.value)
        moments.grad.round(g)
        ahead = add_product(g, n.b2, d, zero)
        v = moments.nu.round(ema(moments.nu.value, ahead * ahead, n.b3, zero))
        m = moments.mu.round(ema(moments.mu.value, g, n.b1, zero))
        e = moments.diff.round(ema(moments.diff.value, opaque(d, zero), n.b2, zero))
        m_hat = add_product(opaque(m * n.r1, zero), n.b2, opaque(e * n.r2, zero), zero)
        return divide(m_hat, sqrt(v * n.r3) + opaque(n.eps, zero))


scale_by_adan = transform_of(ScaleByAdan)
