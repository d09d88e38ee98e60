"""Momentum (contract A10)."""

from dataclasses import KW_ONLY

from halfstep.hyperparameters import Scalar, check_decay_rate
from halfstep.rule import Rule, moment, number
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class Trace(Rule):
    """Replace updates by their decaying sum, kept in 4 to 32 bits: momentum.

        t <- store(g + (decay t))
        u = t, as it was stored; with `nesterov` g + (decay t)

    All operations are in float32, whatever the dtype of `g`, and each is rounded once. t is rounded to its
    dtype once.

    Raises the same errors as `scale_by_adam`. In torch, entries of param groups are `momentum` and
    `accumulator_dtype`. The state has `momentum_buffer`, and for formats with scales `momentum_buffer_scale`.

    Args:
        decay: decay rate of the sum, in [0, 1).
        nesterov: whether to look one step ahead, as in Nesterov's momentum.
        accumulator_dtype: format of the sum, which has a sign, as `mu_dtype` in `scale_by_adam`.
        rounding: rounding of the sum, as `mu_rounding` in `scale_by_adam`.
        seed: seed for the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, optax
        >>> tx = optax.chain(halfstep_jax.trace(0.9), halfstep_jax.scale_by_learning_rate(0.1))
        >>> tx = hs.chain(hs.trace(0.9), hs.scale_by_learning_rate(0.1))

    Source: B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; I. Sutskever
        et al., "On the importance of initialization and momentum in deep learning", ICML 2013, for
        `nesterov`. The form is Optax's. Storage and rounding are ours (contract A10, F).
    """

    decay: Scalar = number(torch="momentum", check=check_decay_rate)
    nesterov: bool = False
    accumulator_dtype: DType = None
    _: KW_ONLY
    rounding: Rounding = "auto"
    seed: Seed = 0
    trace = moment(
        rate="decay",
        dtype="accumulator_dtype",
        rounding="rounding",
        torch="momentum_buffer",
        errors="linear",
    )

    def update(self, g, p, n, m, op):
        """Return the stored sum g + (decay trace), or with `nesterov` the sum one step ahead."""
        t = m.trace.round(g + n.decay * m.trace.value)
        return g + n.decay * t if self.nesterov else t
