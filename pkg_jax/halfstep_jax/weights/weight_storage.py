"""The argument `param_storage` of the aliases, also for chains of any links."""

import functools
from collections.abc import Sequence

import jax
import optax

from halfstep.weight_storage import ParamStorage, check_param_storage
from halfstep_jax.leaf_calls import may_wait
from halfstep_jax.leaves import check_states
from halfstep_jax.numbers.shared_keys import with_shared_keys
from halfstep_jax.weights.narrow_weights import compensate, round_stochastically
from halfstep_jax.weights.wide_weights import keep_master_params, split_params


def store_params(
    inner: optax.GradientTransformation,
    param_storage: ParamStorage = "stochastic",
    *,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Store 16-bit weights in one of the ways of the aliases, after any links.

    Nothing may change an update after the weight is rounded: half of it is half a unit in the last place,
    which is lost. So links that scale or project updates belong into `inner`, with the alias that computes
    them:

        tx = optax.chain(adamw(1e-3, param_storage="nearest"), optax.contrib.reduce_on_plateau(factor=0.5))
        tx = store_params(tx, "split16")

    Rounds params + update as the storage does, once.

    Args:
        inner: any Optax transform that does not store the weights itself. An alias needs
            `param_storage="nearest"`.
        param_storage: "stochastic" (see `round_stochastically`), "compensated" (`compensate`), "split8" or
            "split16" (`split_params`), "master" (`keep_master_params`), or "nearest", which returns `inner`.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform that needs `params`. Its updates are float32; under "nearest" they are the
        updates of `inner`.

    Errors are as in the storages, and ValueError for an unknown storage.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = store_params(optax.chain(optax.sgd(2.0**-11), optax.scale(0.5)), "split16")
        >>> state = tx.init(params)
        >>> for _ in range(16):
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].tolist()
        [0.99609375, 0.99609375]

    Source: ours (contract P).
    """
    return with_param_storage("store_params", param_storage, [inner], seed)


def with_param_storage(
    caller: str, param_storage: str, links: Sequence[optax.GradientTransformation], seed
) -> optax.GradientTransformationExtraArgs:
    """Return a chain of links with its weight storage: a last link, or a wrapper."""
    check_param_storage(caller, param_storage)
    storages = {
        "stochastic": lambda: optax.chain(*links, round_stochastically(seed)),
        "nearest": lambda: optax.chain(*links),
        "compensated": lambda: optax.chain(*links, compensate()),
        "split8": lambda: split_params(optax.chain(*links), 8, seed=seed),
        "split16": lambda: split_params(optax.chain(*links), 16, seed=seed),
        "master": lambda: keep_master_params(optax.chain(*links)),
    }
    tx = storages[param_storage]()
    if caller == "store_params":  # links that a client gives may have other seeds
        return tx
    parts = {"nearest": 0, "stochastic": 1, "compensated": 1}
    count = len(links) + parts[param_storage] if param_storage in parts else 0
    return may_wait(with_shared_keys(tx, functools.partial(check_states, caller, count=count)))
