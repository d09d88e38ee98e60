"""AdEMAMix (contract A15)."""

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByAdemamix(Rule):
    """Rescale updates by AdEMAMix: Adam with a second, much slower gradient average.

    With t the step count and r_i = 1 / (1 - b_i^t):

        nu <- round((b2 nu) + ((1 - b2) (g g)))
        mu <- round((b1 mu) + ((1 - b1) g))
        slow <- round((b3 slow) + ((1 - b3) g))
        u = ((mu r1) + (alpha slow)) / (sqrt((nu r2) + eps_root) + eps)

    All in float32, each operation rounded once. u is computed from the stored arrays. At b3 = 0.9999 an
    average rounded to nearest in 8 bits, or in bfloat16, freezes. By default `slow` is rounded stochastically
    and moves. Raises the same errors as `scale_by_adam`.

    Args:
        b1: decay rate for mu, the fast average.
        b2: decay rate for nu, the second moment.
        b3: decay rate for the slow average, a number.
        alpha: weight for the slow average. In JAX it may be a function of the count, because the paper warms
            it up. In torch it is a group entry.
        eps: number added to the root.
        eps_root: number added under the root.
        mu_dtype: format of mu, as in `scale_by_adam`.
        slow_dtype: format of the slow average, with the same choices as `mu_dtype`.
        nu_dtype: format of nu, as in `scale_by_adam`.
        mu_rounding: rounding for mu, as in `scale_by_adam`.
        slow_rounding: rounding for the slow average, with the same choices as `mu_rounding`.
        nu_rounding: rounding for nu, as in `scale_by_adam`.
        seed: seed for the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Example:
        >>> ScaleByAdemamix(slow_dtype="bfloat16").name
        'scale_by_ademamix'

    Source: M. Pagliardini, P. Ablin, D. Grangier, "The AdEMAMix optimizer: better, faster, older",
        arXiv:2409.03137, algorithm 1. Storage and rounding are ours (contract A15, F).
    """

    b1: Scalar = decay_rate(0.9, torch="betas[0]")
    b2: Scalar = decay_rate(0.999, torch="betas[1]")
    b3: Scalar = decay_rate(0.9999, torch="betas[2]")
    alpha: Scalar = number(5.0, schedule=True)
    eps: Scalar = number(1e-8)
    eps_root: Scalar = number(0.0)
    mu_dtype: DType = None
    slow_dtype: DType = None
    nu_dtype: DType = None
    mu_rounding: Rounding = "auto"
    slow_rounding: Rounding = "auto"
    nu_rounding: Rounding = "stochastic"
    seed: Seed = 0
    mu = moment(rate="b1", torch="exp_avg")
    slow = moment(rate="b3", torch="exp_avg_slow")
    nu = moment(rate="b2", signed=False, torch="exp_avg_sq")

    def numbers(self, h, t, op):
        """Return the inverse bias corrections for mu and nu. The slow average is not corrected."""
        r1, r2 = op.unbias((h.b1, t), (h.b2, t))
        return {"r1": r1, "r2": r2}

    def update(self, g, p, n, m, op):
        """Return ((mu r1) + (alpha slow)) / (sqrt((nu r2) + eps_root) + eps), from the stored averages."""
        v = m.nu.round(op.ema(m.nu.value, g * g, n.b2))
        fast = m.mu.round(op.ema(m.mu.value, g, n.b1))
        slow = m.slow.round(op.ema(m.slow.value, g, n.b3))
        return (fast * n.r1 + n.alpha * slow) / (op.sqrt(v * n.r2 + n.eps_root) + n.eps)
