"""Lion (contract A9)."""

from dataclasses import KW_ONLY

from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, decay_rate, moment
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByLion(Rule):
    """Replace updates by the sign of their average, the average kept in 4 to 32 bits.

    With m the average as it was stored at the step before:

        u = sign((b1 m) + ((1 - b1) g))
        m <- store((b2 m) + ((1 - b2) g))

    All in float32, whatever the dtype of `g`, each operation rounded once. Rounds m to its dtype, once. u is
    1, -1, +0 for a zero of either sign, and NaN for NaN.

    `b1` is the rate of the average whose sign is taken, `b2` of the average that is kept, in a `mu_dtype`
    with a sign. The other arguments and errors are those of `scale_by_adam`. In torch, entries of param
    groups are `betas` and `mu_dtype`; the state is `exp_avg`, and of formats with scales `exp_avg_scale`.

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
        """Return the sign of the average of rate b1, and keep the average of rate b2."""
        m.mu.round(op.ema(m.mu.value, g, n.b2))
        return op.sign(op.ema(m.mu.value, g, n.b1))
