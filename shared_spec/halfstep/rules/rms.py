"""The second moment alone (contract A16)."""

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByRms(Rule):
    """Divide updates by the root of their average square: RMSProp, and Adam without its first moment.

    With t the step count, and r = 1 / (1 - decay^t) with `bias_correction`, else 1:

        nu <- round((decay nu) + ((1 - decay) (g g)))
        u = g / sqrt((nu r) + eps), or, without `eps_in_sqrt`, g / (sqrt(nu r) + eps)

    All in float32, each operation rounded once. u is computed from the stored nu. `optax.scale_by_rms` also
    has `initial_scale`, which is 0 here. Raises the same errors as `scale_by_adam`. The group entries in
    torch are `alpha` (for `decay`), `eps` and `nu_dtype`.

    Args:
        decay: decay rate of the second moment.
        eps: number added under the root, or to it.
        eps_in_sqrt: whether `eps` is added under the root.
        bias_correction: whether to divide the second moment by 1 - decay^t.
        nu_dtype: format of the second moment, as in `scale_by_adam`.
        nu_rounding: its rounding, as in `scale_by_adam`.
        seed: seed for the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Example:
        >>> ScaleByRms(nu_dtype="bfloat16").name
        'scale_by_rms'

    Source: T. Tieleman and G. Hinton, "Lecture 6.5: RMSProp", COURSERA, 2012. Storage and rounding are ours
        (contract A16, F).
    """

    decay: Scalar = decay_rate(0.9, torch="alpha")
    eps: Scalar = number(1e-8)
    eps_in_sqrt: bool = True
    bias_correction: bool = False
    nu_dtype: DType = None
    nu_rounding: Rounding = "stochastic"
    seed: Seed = 0
    nu = moment(rate="decay", signed=False, torch="exp_avg_sq")

    def numbers(self, h, t, op):
        """Return the inverse bias correction."""
        return {"r": op.unbias((h.decay, t))[0] if self.bias_correction else 1.0}

    def update(self, g, p, n, m, op):
        """Return g / sqrt((nu r) + eps), or g / (sqrt(nu r) + eps), from the stored nu."""
        v = m.nu.round(op.ema(m.nu.value, g * g, n.decay)) * n.r
        return g / (op.sqrt(v + n.eps) if self.eps_in_sqrt else op.sqrt(v) + n.eps)
