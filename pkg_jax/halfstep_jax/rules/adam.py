"""The Adam update rule as an Optax transform, composed of moments, storage and random words.

Contract: section A.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax.leaves import check_params
from halfstep_jax.numbers.exact import arrived, hide
from halfstep_jax.numbers.hyperparameters import decay_rate, nonnegative
from halfstep_jax.numbers.moments import bias_correction, ema
from halfstep_jax.numbers.random_words import LeafKey, Role
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import seed_words
from halfstep_jax.storage.formats import Encoded
from halfstep_jax.storage.stored_moment import StoredMoment, update_moments


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        mu: codes of the first moments, in the tree of the params.
        nu: codes of the second moments, likewise.
        mu_scale: scales of `mu`, in the same tree; one byte that means nothing where a leaf has none, and
            `optax.EmptyState()` where no leaf can have any.
        nu_scale: scales of `nu`, likewise.
    """

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    mu_scale: Any = optax.EmptyState()
    nu_scale: Any = optax.EmptyState()


def scale_by_adam(
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    mu_dtype=None,
    *,
    nu_dtype=None,
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    nesterov: bool = False,
    bias_correction: bool = True,
    seed=0,
) -> optax.GradientTransformationExtraArgs:
    """Rescale updates by Adam, the moments kept in 16 bits or in 32.

    With t = count + 1, m and v the stored moments, r1 = 1 / (1 - b1^t), r2 = 1 / (1 - b2^t):

        m <- store((b1 m) + ((1 - b1) g))
        v <- store((b2 v) + ((1 - b2) (g g)))
        u = (m r1) / (sqrt((v r2) + eps_root) + eps)

    All in float32, whatever the dtype of `g`, each operation rounded once. Rounds m and v to their dtypes,
    once each; u reads what was stored. With `nesterov`, (m r1) becomes (b1 (m r1')) + ((1 - b1) (g r1)), r1'
    being r1 at t + 1.

    In place of `optax.scale_by_adam`, whose arithmetic is in the dtype of the params: under bfloat16 params
    its b2 = 0.999 is 1.0.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root.
        eps_root: added under the root.
        mu_dtype: "float32", "bfloat16", "float16" or a format (`scaled`, `codebook`) for the first moment;
            None: bfloat16 for bfloat16 params, else float32.
        nu_dtype: likewise for the second moment, which has no sign: also "ufloat8_e6m2", 8 bits without a
            scale, and the unsigned scaled formats.
        mu_rounding: "stochastic", "nearest", "auto" (nearest, unless that would freeze the average:
            stochastic then, as where `b1` is an array), or "nearest_unchecked" (nearest even so).
        nu_rounding: likewise. Nearest freezes a bfloat16 second moment above b2 = 0.996.
        nesterov: as in Optax.
        bias_correction: False leaves the averages as they are: r1 = r2 = 1.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform. Its updates are float32; `params` may be left out. Numbers may be float32 scalar
        arrays, so that `optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)` works (give it dtypes by
        name: it takes `jnp.bfloat16` for a schedule). Sharded arrays get the bits of one device under
        `jax.jit`; inside `jax.shard_map` every shard counts its words from 0.

    Raises:
        TypeError: if an argument is of the wrong type, or an array of another dtype than float32; from `init`
            and `update`, if a leaf is not float32, bfloat16 or float16.
        ValueError: if an argument is out of range, or a moment would freeze; from `update`, if trees or
            shapes differ.

    Example:
        >>> params = {"w": jnp.array([1.0, -2.0], jnp.bfloat16)}
        >>> tx = scale_by_adam()
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([0.5, -0.5], jnp.bfloat16)}, state)
        >>> print(updates["w"].dtype, state.nu["w"].dtype)
        float32 bfloat16

    Source: D. P. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; T.
    Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016, for `nesterov`. The storage is
    ours (contract A5, F).
    """
    function = "scale_by_adam"
    b1, b2 = decay_rate(function, "b1", b1), decay_rate(function, "b2", b2)
    rule = _Adam(
        b1=b1,
        b2=b2,
        eps=nonnegative(function, "eps", eps),
        eps_root=nonnegative(function, "eps_root", eps_root),
        nesterov=nesterov,
        bias_correction=bias_correction,
        mu=StoredMoment(function, "mu", mu_dtype, mu_rounding, "b1", b1, Role.MU),
        nu=StoredMoment(function, "nu", nu_dtype, nu_rounding, "b2", b2, Role.NU, positive=True),
    )
    seed = seed_words(function, seed)

    def init(params):
        check_params(function, params)
        mu, mu_scale = rule.mu.init(params)
        nu, nu_scale = rule.nu.init(params)
        return ScaleByAdamState(jnp.zeros([], jnp.int32), seed, mu, nu, mu_scale, nu_scale)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        count = next_count(state.count)
        stored = ((state.mu, state.mu_scale), (state.nu, state.nu_scale))
        step = functools.partial(rule.step, rule.corrections(count))
        moments = (rule.mu, rule.nu)
        us, stored = update_moments(function, moments, updates, stored, state.seed, count, step)
        (mu, mu_scale), (nu, nu_scale) = stored
        return us, ScaleByAdamState(count, state.seed, mu, nu, mu_scale, nu_scale)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Adam:
    """The rule on one leaf. Hyperparameters are float32."""

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    nesterov: bool
    bias_correction: bool
    mu: StoredMoment
    nu: StoredMoment

    def corrections(self, count: jax.Array) -> jax.Array:
        """Return r1, r2 and r1', the reciprocals of the bias corrections: float32[3]."""
        if not self.bias_correction:
            return jnp.ones(3, jnp.float32)
        rates = jnp.stack([jnp.asarray(b) for b in (self.b1, self.b2, self.b1)])
        return np.float32(1) / bias_correction(rates, count + np.array([0, 0, 1], np.int32))

    def step(self, corrections: jax.Array, key: LeafKey, g: jax.Array, mu: Encoded, nu: Encoded):
        """Return the update and the new stored moments."""
        zero = key.zero()
        g = arrived(g, zero)
        words = functools.partial(key.words, shape=g.shape)
        mu = self.mu.encode(mu, ema(self.mu.decode(mu), g, self.b1, zero), words)
        nu = self.nu.encode(nu, ema(self.nu.decode(nu), g * g, self.b2, zero), words)
        # From here on the moments are what a checkpoint would hold.
        m, v = self.mu.decode(mu), self.nu.decode(nu)
        r1, r2, r1_next = corrections
        if self.nesterov:
            m_hat = ema(hide(m * r1_next, zero), hide(g * r1, zero), self.b1, zero)
        else:
            m_hat = m * r1
        # A visible eps of 0 goes, and a quotient by a bare root becomes a product with an approximate rsqrt.
        eps = hide(self.eps, zero)
        return m_hat / (jnp.sqrt(self._plus_eps_root(v * r2, zero)) + eps), mu, nu

    def _plus_eps_root(self, v_hat: jax.Array, zero: jax.Array) -> jax.Array:
        if isinstance(self.eps_root, np.floating) and self.eps_root == 0:
            return v_hat
        return hide(v_hat, zero) + self.eps_root
