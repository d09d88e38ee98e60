"""AdEMAMix (contract A15)."""

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByAdemamix(Rule):
    """Rescale updates by AdEMAMix: Adam with a second, much slower average of gradients.

    With t the count of steps and r_i = 1 / (1 - b_i^t):

        nu <- round((b2 nu) + ((1 - b2) (g g)))
        mu <- round((b1 mu) + ((1 - b1) g))
        slow <- round((b3 slow) + ((1 - b3) g))
        u = ((mu r1) + (alpha slow)) / (sqrt((nu r2) + eps_root) + eps)

    All in float32, each operation rounded once; u reads what was stored. At b3 = 0.9999 an average rounded to
    nearest in 8 bits, or in bfloat16, freezes. By default `slow` is rounded stochastically and moves. Errors
    are those of `scale_by_adam`.

    Args:
        b1: decay rate of the fast average.
        b2: decay rate of the second moment.
        b3: decay rate of the slow average, a number.
        alpha: weight of the slow average. In JAX it may be a function of the count, as the paper warms it up;
            in torch it is an entry of the group.
        eps: added to the root.
        eps_root: added under the root.
        mu_dtype: format of the fast average, as in `scale_by_adam`.
        slow_dtype: format of the slow average, as `mu_dtype`.
        nu_dtype: format of the second moment, as in `scale_by_adam`.
        mu_rounding: rounding of the fast average, as in `scale_by_adam`.
        slow_rounding: rounding of the slow average, as `mu_rounding`.
        nu_rounding: rounding of the second moment, as in `scale_by_adam`.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

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
        """Return the inverse bias corrections; the slow average has none."""
        r1, r2 = op.unbias((h.b1, t), (h.b2, t))
        return {"r1": r1, "r2": r2}

    def update(self, g, p, n, m, op):
        """Return ((mu r1) + (alpha slow)) / (sqrt((nu r2) + eps_root) + eps), of the averages as stored."""
        v = m.nu.round(op.ema(m.nu.value, g * g, n.b2))
        fast = m.mu.round(op.ema(m.mu.value, g, n.b1))
        slow = m.slow.round(op.ema(m.slow.value, g, n.b3))
        return (fast * n.r1 + n.alpha * slow) / (op.sqrt(v * n.r2 + n.eps_root) + n.eps)
