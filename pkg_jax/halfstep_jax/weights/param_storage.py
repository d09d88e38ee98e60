"""How an alias stores its weights: the argument `param_storage`, as links of a chain."""

import optax

from halfstep_jax.weights.params import compensate, round_stochastically
from halfstep_jax.weights.wide_params import keep_master_params, split_params


def with_param_storage(caller: str, param_storage: str, links, seed) -> optax.GradientTransformationExtraArgs:
    """Return a chain of links with what stores its weights: a last link, or a wrapper of the whole.

    Args:
        caller: the alias, for the error.
        param_storage: its argument.
        links: of the chain.
        seed: of the random words.

    Raises:
        ValueError: if `param_storage` is not a weight storage.
    """
    storages = {
        "stochastic": lambda: optax.chain(*links, round_stochastically(seed)),
        "nearest": lambda: optax.chain(*links),
        "compensated": lambda: optax.chain(*links, compensate()),
        "split8": lambda: split_params(optax.chain(*links), 8, seed=seed),
        "split16": lambda: split_params(optax.chain(*links), 16, seed=seed),
        "master": lambda: keep_master_params(optax.chain(*links)),
    }
    if param_storage not in storages:
        names = [f'"{name}"' for name in storages]
        raise ValueError(
            f"{caller}: param_storage={param_storage!r} is not a weight storage. "
            f"Use {', '.join(names[:-1])} or {names[-1]}."
        )
    return storages[param_storage]()
