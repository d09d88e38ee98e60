"""Whole optimizers: the order in which their links stand. No arithmetic.

Contract: A6.
"""

import optax

from halfstep_jax.rules.adam import scale_by_adam
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.rules.lion import scale_by_lion
from halfstep_jax.rules.trace import trace
from halfstep_jax.rules.weight_decay import add_decayed_weights
from halfstep_jax.weights.params import compensate, round_stochastically
from halfstep_jax.weights.wide_params import keep_master_params, split_params


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

    `scale_by_adam`, `scale_by_learning_rate`, and what stores the weights: by default `round_stochastically`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added under the root.
        mu_dtype: "float32", "bfloat16", "float16" or a format (`scaled`, `codebook`); None: bfloat16 for
            bfloat16 params, else float32.
        nu_dtype: likewise, and "ufloat8_e6m2".
        mu_rounding: "auto", "stochastic", "nearest" or "nearest_unchecked"; see `scale_by_adam`.
        nu_rounding: likewise.
        param_storage: how 16-bit weights are stored: "stochastic" rounds them stochastically; "nearest" lets
            `optax.apply_updates` round them, which drops small updates; "compensated" keeps what is lost (see
            `compensate`); "split8" and "split16" keep further bits (see `split_params`), "master" a float32
            copy (see `keep_master_params`): under these three the links see float32 weights, and so moments
            are float32 by default.
        nesterov: as in Optax.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, to be applied with `optax.apply_updates`. Its updates are float32.

    Raises:
        TypeError: as the links do.
        ValueError: as the links do, or if `param_storage` is none of these.

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
    links = [
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
    ]
    return stored("adam", param_storage, links, seed)


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

    `scale_by_adam`, `add_decayed_weights`, `scale_by_learning_rate`, and what stores the weights: by default
    `round_stochastically`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule. It scales the decay too, as in
            Optax.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added under the root.
        mu_dtype: "float32", "bfloat16", "float16" or a format (`scaled`, `codebook`); None: bfloat16 for
            bfloat16 params, else float32.
        weight_decay: a number >= 0, a float32 scalar array, or a schedule.
        mask: which leaves decay, as in `add_decayed_weights`.
        nu_dtype: likewise, and "ufloat8_e6m2".
        mu_rounding: "auto", "stochastic", "nearest" or "nearest_unchecked"; see `scale_by_adam`.
        nu_rounding: likewise.
        param_storage: how 16-bit weights are stored: "stochastic" rounds them stochastically; "nearest" lets
            `optax.apply_updates` round them, which drops small updates; "compensated" keeps what is lost (see
            `compensate`); "split8" and "split16" keep further bits (see `split_params`), "master" a float32
            copy (see `keep_master_params`): under these three the links see float32 weights, and so moments
            are float32 by default.
        nesterov: as in Optax.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, to be applied with `optax.apply_updates`. Its updates are float32.

    Raises:
        TypeError: as the links do.
        ValueError: as the links do, or if `param_storage` is none of these.

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
    links = [
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
    ]
    return stored("adamw", param_storage, links, seed)


def lion(
    learning_rate,
    b1=0.9,
    b2=0.99,
    mu_dtype=None,
    weight_decay=1e-3,
    mask=None,
    *,
    mu_rounding: str = "auto",
    param_storage: str = "stochastic",
    seed=0,
) -> optax.GradientTransformationExtraArgs:
    """Lion for weights in bfloat16, float16 or float32: the sign of an average, with decoupled decay.

    `scale_by_lion`, `add_decayed_weights`, `scale_by_learning_rate`, and what stores the weights: by default
    `round_stochastically`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule. It scales the decay too.
        b1: rate of the average whose sign is taken.
        b2: decay rate of the average that is kept.
        mu_dtype: of that average: "float32", "bfloat16", "float16" or a signed format (`scaled`, `codebook`);
            None: bfloat16 for bfloat16 params, else float32.
        weight_decay: a number >= 0, a float32 scalar array, or a schedule.
        mask: which leaves decay, as in `add_decayed_weights`.
        mu_rounding: as in `scale_by_lion`.
        param_storage: how 16-bit weights are stored, as in `adamw`.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, to be applied with `optax.apply_updates`. Its updates are float32.

    Raises:
        TypeError: as the links do.
        ValueError: as the links do, or if `param_storage` is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = lion(1e-4, mu_dtype="float32")
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).dtype
        dtype(bfloat16)

    Source: as `scale_by_lion`; the order of the links is contract A6.
    """
    links = [
        scale_by_lion(b1, b2, mu_dtype, mu_rounding=mu_rounding, seed=seed),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    ]
    return stored("lion", param_storage, links, seed)


def sgd(
    learning_rate,
    momentum=None,
    nesterov: bool = False,
    accumulator_dtype=None,
    *,
    rounding: str = "auto",
    param_storage: str = "stochastic",
    seed=0,
) -> optax.GradientTransformationExtraArgs:
    """Gradient descent for weights in bfloat16, float16 or float32, with momentum or without.

    `trace`, unless `momentum` is None or 0, `scale_by_learning_rate`, and what stores the weights: by default
    `round_stochastically`.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule.
        momentum: decay of the sum of gradients; None or 0 keeps none.
        nesterov: as in `trace`.
        accumulator_dtype: of the sum, as in `trace`.
        rounding: of the sum, as in `trace`.
        param_storage: how 16-bit weights are stored, as in `adamw`.
        seed: of the random words, for the sum and the weights alike.

    Returns:
        An Optax transform, to be applied with `optax.apply_updates`. Its updates are float32.

    Raises:
        TypeError: as the links do.
        ValueError: as the links do, or if `param_storage` is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> tx = sgd(0.5, momentum=0.9)
        >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
        >>> optax.apply_updates(params, updates).tolist()
        [0.5, 0.5, 0.5]

    Source: as `trace`; the order of the links is contract A6.
    """
    links = [scale_by_learning_rate(learning_rate)]
    constant_zero = isinstance(momentum, int | float) and momentum == 0
    if momentum is not None and not constant_zero:
        links.insert(0, trace(momentum, nesterov, accumulator_dtype, rounding=rounding, seed=seed))
    return stored("sgd", param_storage, links, seed)


def stored(caller: str, param_storage: str, links, seed) -> optax.GradientTransformationExtraArgs:
    """Return a chain with what stores its weights: a last link, or a wrapper of the whole.

    Args:
        caller: the alias, for the error.
        param_storage: its argument.
        links: of the chain.
        seed: of the random words.

    Raises:
        ValueError: if `param_storage` is no way to store weights.
    """
    ways = {
        "stochastic": lambda: optax.chain(*links, round_stochastically(seed)),
        "nearest": lambda: optax.chain(*links),
        "compensated": lambda: optax.chain(*links, compensate()),
        "split8": lambda: split_params(optax.chain(*links), 8, seed=seed),
        "split16": lambda: split_params(optax.chain(*links), 16, seed=seed),
        "master": lambda: keep_master_params(optax.chain(*links)),
    }
    if param_storage not in ways:
        names = ", ".join(f'"{name}"' for name in list(ways)[:-1])
        raise ValueError(
            f"{caller}: param_storage={param_storage!r} is not a way to store weights. "
            f'Use {names} or "{list(ways)[-1]}".'
        )
    return ways[param_storage]()
