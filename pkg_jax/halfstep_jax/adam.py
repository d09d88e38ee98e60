"""The Adam update rule as an Optax transform, composed of moments, formats and random words.

Contract: section A.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep_jax import hyperparameters
from halfstep_jax.exact import hidden_zero, hide, rounded
from halfstep_jax.formats import Format, as_format, default_format
from halfstep_jax.leaves import check_params, flatten_alike, flatten_updates
from halfstep_jax.moments import bias_correction, ema
from halfstep_jax.random_words import Role, leaf_id, leaf_keys, words_of_key
from halfstep_jax.seeds import seed_words

_SAME_TREE = "Pass the tree that init saw."


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2].
        mu: the first moments, in the tree of the params.
        nu: the second moments.
    """

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    nu: optax.Updates


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
    seed=0,
) -> optax.GradientTransformationExtraArgs:
    """Rescale updates by Adam, with moments stored in 16 bits or in 32."""
    function = "scale_by_adam"
    b1 = hyperparameters.decay_rate(function, "b1", b1)
    b2 = hyperparameters.decay_rate(function, "b2", b2)
    eps = hyperparameters.nonnegative(function, "eps", eps)
    eps_root = hyperparameters.nonnegative(function, "eps_root", eps_root)
    mu_format = None if mu_dtype is None else as_format(function, "mu_dtype", mu_dtype)
    nu_format = None if nu_dtype is None else as_format(function, "nu_dtype", nu_dtype)
    seed = seed_words(function, seed)

    def init(params):
        check_params(function, params)
        mu = jax.tree.map(lambda p: (mu_format or default_format(p)).zeros_like(p), params)
        nu = jax.tree.map(lambda p: (nu_format or default_format(p)).zeros_like(p), params)
        return ScaleByAdamState(jnp.zeros([], jnp.int32), seed, mu, nu)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        leaves = flatten_updates(function, updates)
        mus = flatten_alike(function, leaves, state.mu, "state", _SAME_TREE)
        nus = flatten_alike(function, leaves, state.nu, "state", _SAME_TREE)
        count = optax.safe_increment(state.count)
        keys = leaf_keys(state.seed, count, [leaf_id(name) for name in leaves.names], (Role.MU, Role.NU))
        r1, r2, r1_next = np.float32(1) / bias_correction(
            jnp.stack([jnp.asarray(b) for b in (b1, b2, b1)]), count + jnp.array([0, 0, 1])
        )
        us, new_mus, new_nus = [], [], []
        for i, (g, mu, nu) in enumerate(zip(leaves.values, mus, nus, strict=True)):
            if g is None:
                us.append(None), new_mus.append(mu), new_nus.append(nu)
                continue
            zero = hidden_zero(keys.k0[i])
            g = hide(jnp.asarray(g).astype(jnp.float32), zero)
            m_fmt, v_fmt = Format(mu.dtype.name), Format(nu.dtype.name)
            m = ema(m_fmt.decode(mu), g, hide(jnp.asarray(b1), zero))
            v = ema(v_fmt.decode(nu), rounded(g * g), hide(jnp.asarray(b2), zero))

            def words(fmt, rounding, b, role):
                if _stochastic(fmt, rounding, b):
                    return words_of_key(keys.k0[i], keys.k1[role, i], g.shape)
                return None

            mu = m_fmt.encode(m, words(m_fmt, mu_rounding, b1, 0))
            nu = v_fmt.encode(v, words(v_fmt, nu_rounding, b2, 1))
            m, v = m_fmt.decode(mu), v_fmt.decode(nu)
            if nesterov:
                m_hat = ema(rounded(m * r1_next), rounded(g * r1), hide(jnp.asarray(b1), zero))
            else:
                m_hat = m * r1
            us.append(m_hat / (jnp.sqrt(rounded(v * r2) + eps_root) + eps))
            new_mus.append(mu), new_nus.append(nu)
        unflatten = leaves.treedef.unflatten
        return unflatten(us), ScaleByAdamState(count, state.seed, unflatten(new_mus), unflatten(new_nus))

    return optax.GradientTransformationExtraArgs(init, update)


def _stochastic(fmt, rounding, b):
    if not fmt.rounds:
        return False
    if rounding == "auto":
        return isinstance(b, jax.Array) or fmt.freezes(b)
    return rounding == "stochastic"
