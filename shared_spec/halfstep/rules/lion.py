"""Lion (contract A9)."""

from dataclasses import KW_ONLY

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, decay_rate, moment
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByLion(Rule):
    """Replace updates by the sign of their average, the average kept in 4 to 32 bits.

    With m the average stored at the previous step:

        u = sign((b1 m) + ((1 - b1) g))
        m <- store((b2 m) + ((1 - b2) g))

    All operations are in float32, whatever the dtype of `g`, and each is rounded once. m is rounded to its
    dtype once. u is 1, -1, +0 for a zero of either sign, and NaN for NaN.

    `b1` is the decay rate in u, and `b2` the decay rate in m, which needs a signed `mu_dtype`. The other
    arguments and errors are the same as in `scale_by_adam`. In torch, entries of param groups are `betas` and
    `mu_dtype`. The state has `exp_avg`, and for formats with scales `exp_avg_scale`.

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, optax
        >>> tx = optax.chain(halfstep_jax.scale_by_lion(), halfstep_jax.scale_by_learning_rate(1e-4))
        >>> tx = hs.chain(hs.scale_by_lion(), hs.scale_by_learning_rate(1e-4))

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
        Storage and rounding are ours (contract A9, F).
    """

    b1: Scalar = decay_rate(0.9, torch="betas[0]")
    b2: Scalar = decay_rate(0.99, torch="betas[1]")
    mu_dtype: DType = None
    _: KW_ONLY
    mu_rounding: Rounding = "auto"
    seed: Seed = 0
    mu = moment(rate="b2", torch="exp_avg")

    def update(self, g, p, n, m, op):
        """Return the sign of the average with rate b1, and keep the average with rate b2."""
        m.mu.round(op.ema(m.mu.value, g, n.b2))
        return op.sign(op.ema(m.mu.value, g, n.b1))
