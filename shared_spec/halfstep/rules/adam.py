"""Adam (contract A5, A7, A12)."""

from dataclasses import KW_ONLY

import numpy as np

from halfstep.hyperparameters import Scalar
from halfstep.moments import Moments
from halfstep.numbers import Number, Numbers
from halfstep.op import Op
from halfstep.rule import Rule, decay_rate, moment, number, option
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.fourth_roots import FOURTH_ROOT
from halfstep.storage.moment_formats import Rounding

_SMALLEST, _ABOVE = FOURTH_ROOT.smallest, FOURTH_ROOT.smallest * np.float32(2.0**-16)


class ScaleByAdam(Rule):
    """Rescale updates by Adam, the moments kept in 4 to 32 bits.

    With t the count of steps, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

        m <- store((b1 m) + ((1 - b1) g))
        v <- store((b2 v) + ((1 - b2) (g g)))
        u = (m r1) / (sqrt((v r2) + eps_root) + eps)

    All operations are in float32, whatever the dtype of `g`, and each is rounded once. m and v are rounded to
    their dtypes once each. u is float32 and is computed from the stored moments. With `nesterov`, (m r1)
    becomes (b1 (m r1')) + ((1 - b1) (g r1)), r1' being r1 at t + 1.

    In JAX `params` may be left out of `update`. Use the link instead of `optax.scale_by_adam`, which computes
    in the params' dtype: with bfloat16 params its b2 = 0.999 is 1.0. Numbers may be float32 scalar arrays, so
    that `optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)` works. With `static_args=("b1", "b2")`
    "auto" gets numbers, and the bits are the same as in the plain transform. (Pass dtypes by name, because it
    treats the callable `jnp.bfloat16` as a schedule.) A sharded array gets the same bits as on a single
    device under `jax.jit`, and in `jax.shard_map` with `in_shard_map`.

    In torch, entries of param groups are `betas`, `eps`, `eps_root`, `mu_dtype` and `nu_dtype`. The state has
    `exp_avg` and `exp_avg_sq`, and for formats with scales `exp_avg_scale` and `exp_avg_sq_scale`.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: number added to the root.
        eps_root: number added under the root.
        mu_dtype: format of the first moment: "float32", "bfloat16", "float16", a framework dtype, or a signed
            format (`scaled`, `codebook`, `relative`). None is bfloat16 for bfloat16 weights, else float32.
        nu_dtype: format of the second moment. Because it has no sign, "ufloat16_e7m9" with 16 bits and the
            unsigned scaled formats are allowed too. With mu_dtype=relative("mulaw8") it may be "uroot4_e4m4".
            Then u is computed from m and v before they are stored, and eps is added under the root.
        mu_rounding: "stochastic", "feedback", "nearest", "nearest_unchecked" (nearest even if that freezes m)
            or "auto". "feedback" is stochastic, and the update immediately compensates the amount that the
            error in storing m would add to later updates. "auto" is nearest if the average stays within a
            thousandth of its true value. Otherwise, and if `b1` is an array, it is stochastic.
        nu_rounding: the same choices except "feedback". Nearest freezes a bfloat16 second moment above
            b2 = 0.996.
        nesterov: whether to use Nesterov's momentum, as Optax does.
        bias_correction: whether to correct the bias. If False, r1 = r2 = 1.
        seed: seed for the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Raises:
        TypeError: if an argument has a wrong type, or is an array whose dtype is not float32. From `init`
            and `update` in JAX, if a leaf is not float32, bfloat16, float16 or float64.
        ValueError: if an argument is out of range, a dtype holds no moment, or a rounding freezes it. From
            `update` in JAX, if trees or shapes differ.

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, optax
        >>> link = halfstep_jax.scale_by_adam(b2=0.99, nu_dtype="bfloat16")
        >>> tx = optax.chain(link, halfstep_jax.scale_by_learning_rate(1e-3))
        >>> link = hs.scale_by_adam(b2=0.99, nu_dtype="bfloat16")
        >>> tx = hs.chain(link, hs.scale_by_learning_rate(1e-3))

    Source: D. P. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; T.
        Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016, for `nesterov`. Storage and
        rounding are ours (contract A5, F).
    """

    b1: Scalar = decay_rate(0.9, torch="betas[0]")
    b2: Scalar = decay_rate(0.999, torch="betas[1]")
    eps: Scalar = number(1e-8)
    eps_root: Scalar = number(0.0)
    mu_dtype: DType = None
    _: KW_ONLY
    nu_dtype: DType = None
    mu_rounding: Rounding = "auto"
    nu_rounding: Rounding = "stochastic"
    nesterov: bool = False
    bias_correction: bool = option(True)
    seed: Seed = 0
    mu = moment(rate="b1", unit="nu", torch="exp_avg", errors="linear")
    nu = moment(rate="b2", signed=False, torch="exp_avg_sq")

    def numbers(self, h, t, op):
        """Return the inverse bias corrections, also for mu at the next step, and the numbers for A12."""
        rest, smallest = 1 - h.b2, op.maximum(h.eps * h.eps + h.eps_root, _SMALLEST)
        n = {"rest": rest, "floor": rest * smallest + _ABOVE}
        if not self.bias_correction:
            return {**n, "r1": 1.0, "r2": 1.0, "r1_next": 1.0, "unbias": 1.0}
        r1, r2, r1_next = op.unbias((h.b1, t), (h.b2, t), (h.b1, t + 1))
        unbias = (1 if self.nesterov else r1) / op.sqrt(r2)
        return {**n, "r1": r1, "r2": r2, "r1_next": r1_next, "unbias": unbias}

    def update(self, g, p, n, m, op):
        """Return (mu r1) / (sqrt((nu r2) + eps_root) + eps), from the stored averages."""
        if m.nu.has_inverse_root:
            return self._by_inverse_root(g, n, m, op)
        v = m.nu.round(op.ema(m.nu.value, g * g, n.b2))
        mu = m.mu.round(op.ema(m.mu.value, g, n.b1))
        ahead = op.ema(mu * n.r1_next, g * n.r1, n.b1) if self.nesterov else mu * n.r1
        # One expression, so that eager torch keeps no more arrays than the formula has.
        return ahead / (op.sqrt(v * n.r2 if op.is_zero(self.eps_root) else v * n.r2 + n.eps_root) + n.eps)

    def _by_inverse_root(self, g: Number, n: Numbers, m: Moments, op: Op) -> Number:
        """Return (mu s) unbias, with s about 1 / sqrt(nu), from the averages before they are stored."""
        s = m.nu.inverse_root(n.b2 * m.nu.value + (n.rest * (g * g) + n.floor))
        mu = op.ema(m.mu.value, g, n.b1)
        m.mu.round(mu)
        ahead = op.ema(mu * n.r1_next, g * n.r1, n.b1) if self.nesterov else mu
        return (ahead * s) * n.unbias
