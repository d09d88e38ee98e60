"""Adan (contract A11)."""

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByAdan(Rule):
    """Rescale updates by Adan: Adam with an average of the differences between gradients.

    With t the step count, d the gradient less the last stored gradient (0 at t = 1), and
    r_i = 1 / (1 - b_i^t):

        grad <- round(g)
        nu <- round((b3 nu) + ((1 - b3) (g + (b2 d))^2))
        mu <- round((b1 mu) + ((1 - b1) g))
        diff <- round((b2 diff) + ((1 - b2) d))
        u = ((mu r1) + (b2 (diff r2))) / (sqrt(nu r3) + eps)

    All in float32, each operation rounded once. u is computed from the stored arrays. Raises the same errors
    as `scale_by_adam`.

    Args:
        b1: decay rate for mu, the average gradient.
        b2: decay rate for diff, the average difference.
        b3: decay rate for nu, the average square.
        eps: number added to the root.
        mu_dtype: format of mu, as in `scale_by_adam`.
        diff_dtype: format of diff, with the same choices as `mu_dtype`.
        nu_dtype: format of nu, as in `scale_by_adam`.
        grad_dtype: format of the last gradient, with the same choices as `mu_dtype`.
        mu_rounding: rounding for the three signed arrays, as in `scale_by_adam`.
        nu_rounding: rounding for nu, as in `scale_by_adam`.
        seed: seed for the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Example:
        >>> ScaleByAdan(nu_dtype="bfloat16").name
        'scale_by_adan'

    Source: X. Xie et al., "Adan", arXiv:2208.06677, algorithm 1, with rates written as 1 - b. Optax 0.2.8
        multiplies the difference by 1 - b2 instead of b2. Storage and rounding are ours (contract A11, F).
    """

    b1: Scalar = decay_rate(0.98, torch="betas[0]")
    b2: Scalar = decay_rate(0.92, torch="betas[1]")
    b3: Scalar = decay_rate(0.99, torch="betas[2]")
    eps: Scalar = number(1e-8)
    mu_dtype: DType = None
    diff_dtype: DType = None
    nu_dtype: DType = None
    grad_dtype: DType = None
    mu_rounding: Rounding = "auto"
    nu_rounding: Rounding = "stochastic"
    seed: Seed = 0
    mu = moment(rate="b1", torch="exp_avg")
    diff = moment(rate="b2", rounding="mu_rounding", torch="exp_avg_diff")
    nu = moment(rate="b3", signed=False, torch="exp_avg_sq")
    grad = moment(rounding="mu_rounding", torch="last_grad")

    def numbers(self, h, t, op):
        """Return the inverse bias corrections, and `later`, which is 0 at the first step and 1 after it."""
        r1, r2, r3 = op.unbias((h.b1, t), (h.b2, t), (h.b3, t))
        return {"r1": r1, "r2": r2, "r3": r3, "later": op.float32(t > 1)}

    def update(self, g, p, n, m, op):
        """Return ((mu r1) + (b2 (diff r2))) / (sqrt(nu r3) + eps), from the stored averages."""
        d = n.later * (g - m.grad.value)
        m.grad.round(g)
        ahead = g + n.b2 * d
        v = m.nu.round(op.ema(m.nu.value, ahead * ahead, n.b3))
        mu = m.mu.round(op.ema(m.mu.value, g, n.b1))
        diff = m.diff.round(op.ema(m.diff.value, d, n.b2))
        return (mu * n.r1 + n.b2 * (diff * n.r2)) / (op.sqrt(v * n.r3) + n.eps)
