"""Whole optimizers: the order in which the links of `adam` and `adamw` stand. No arithmetic.

Contract: A6.
"""

import optax

from halfstep_jax.adam import scale_by_adam
from halfstep_jax.learning_rate import scale_by_learning_rate
from halfstep_jax.params import round_stochastically
from halfstep_jax.weight_decay import add_decayed_weights


def adam(
    learning_rate,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    mu_dtype=None,
    *,
    nu_dtype=None,
    mu_rounding="auto",
    nu_rounding="stochastic",
    param_storage="stochastic",
    nesterov=False,
    seed=0,
):
    """Adam."""
    return optax.chain(
        scale_by_adam(
            b1,
            b2,
            eps,
            eps_root,
            mu_dtype,
            nu_dtype=nu_dtype,
            mu_rounding=mu_rounding,
            nu_rounding=nu_rounding,
            nesterov=nesterov,
            seed=seed,
        ),
        scale_by_learning_rate(learning_rate),
        *_storage("adam", param_storage, seed),
    )


def adamw(
    learning_rate,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    mu_dtype=None,
    weight_decay=1e-4,
    mask=None,
    *,
    nu_dtype=None,
    mu_rounding="auto",
    nu_rounding="stochastic",
    param_storage="stochastic",
    nesterov=False,
    seed=0,
):
    """AdamW."""
    return optax.chain(
        scale_by_adam(
            b1,
            b2,
            eps,
            eps_root,
            mu_dtype,
            nu_dtype=nu_dtype,
            mu_rounding=mu_rounding,
            nu_rounding=nu_rounding,
            nesterov=nesterov,
            seed=seed,
        ),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
        *_storage("adamw", param_storage, seed),
    )


def _storage(function, param_storage, seed):
    if param_storage == "stochastic":
        return (round_stochastically(seed),)
    if param_storage == "nearest":
        return ()
    raise ValueError(
        f'{function}: param_storage={param_storage!r} is not a way to store weights. Use "stochastic" or "nearest".'
    )
