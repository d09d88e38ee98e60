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
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    param_storage: str = "stochastic",
    nesterov: bool = False,
    seed=0,
) -> optax.GradientTransformationExtraArgs:
    """Adam for weights in bfloat16, float16 or float32.

    `scale_by_adam`, `scale_by_learning_rate`, and `round_stochastically` for `param_storage="stochastic"`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added under the root.
        mu_dtype: "float32", "bfloat16" or "float16"; None: bfloat16 for bfloat16 params, else float32.
        nu_dtype: likewise.
        mu_rounding: "auto", "stochastic", "nearest" or "nearest_unchecked"; see `scale_by_adam`.
        nu_rounding: likewise.
        param_storage: "stochastic" rounds the weights stochastically; "nearest" leaves it to
            `optax.apply_updates`, which rounds to nearest and so drops small updates of 16-bit weights.
        nesterov: as in Optax.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, to be applied with `optax.apply_updates`. Its updates are float32.

    Raises:
        TypeError: as the links do.
        ValueError: as the links do, or if `param_storage` is neither of the two.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = adam(1e-3)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jax.grad(lambda p: (p**2).sum())(params), state, params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_adam`; the order of the links is contract A6.
    """
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
        *_last_links("adam", param_storage, seed),
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
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    param_storage: str = "stochastic",
    nesterov: bool = False,
    seed=0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW for weights in bfloat16, float16 or float32: Adam with decoupled weight decay.

    `scale_by_adam`, `add_decayed_weights`, `scale_by_learning_rate`, and `round_stochastically` for
    `param_storage="stochastic"`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule. It scales the decay too, as in
            Optax.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added under the root.
        mu_dtype: "float32", "bfloat16" or "float16"; None: bfloat16 for bfloat16 params, else float32.
        weight_decay: a number >= 0, a float32 scalar array, or a schedule.
        mask: which leaves decay, as in `add_decayed_weights`.
        nu_dtype: likewise.
        mu_rounding: "auto", "stochastic", "nearest" or "nearest_unchecked"; see `scale_by_adam`.
        nu_rounding: likewise.
        param_storage: "stochastic" rounds the weights stochastically; "nearest" leaves it to
            `optax.apply_updates`, which rounds to nearest and so drops small updates of 16-bit weights.
        nesterov: as in Optax.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, to be applied with `optax.apply_updates`. Its updates are float32.

    Raises:
        TypeError: as the links do.
        ValueError: as the links do, or if `param_storage` is neither of the two.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = adamw(optax.cosine_decay_schedule(1e-3, 100), weight_decay=0.1)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jax.grad(lambda p: (p**2).sum())(params), state, params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019; the order of the
    links is contract A6.
    """
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
        *_last_links("adamw", param_storage, seed),
    )


def _last_links(function: str, param_storage: str, seed) -> tuple[optax.GradientTransformationExtraArgs, ...]:
    if param_storage == "stochastic":
        return (round_stochastically(seed),)
    if param_storage == "nearest":
        return ()
    raise ValueError(
        f"{function}: param_storage={param_storage!r} is not a way to store weights. "
        'Use "stochastic" or "nearest".'
    )
