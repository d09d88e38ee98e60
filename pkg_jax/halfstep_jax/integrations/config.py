"""Optimizers by name, for the configs of trainers."""

import inspect
import sys

import optax

from halfstep.config import chosen, read_config
from halfstep.hyperparameters import Arguments


def from_config(config: str | Arguments) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that a config names.

    Args:
        config: a text, `"adamw(learning_rate=1e-3, recipe='one_pass')"`, or a mapping with a `name` beside
            the arguments, which may be schedules there. Case and underscores of the name do not count.
            Arguments in a text are literals; a text is parsed, and never run.

    Raises:
        TypeError: if the config is neither a text nor a mapping.
        ValueError: if it names no optimizer, or an argument that it lacks, or holds code.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = from_config("AdamW(learning_rate=1e-3, recipe='one_pass')")
        >>> tx.init({"w": jnp.ones(4, jnp.bfloat16)})[0].nu["w"].dtype
        dtype('uint8')

    Source: ours.
    """
    name, arguments = read_config("from_config", config)
    package = vars(sys.modules["halfstep_jax"])
    optimizers = {key: package[key] for key in package["__all__"] if _is_alias(key, package[key])}
    optimizers["AdamWScheduleFree"] = optimizers["schedule_free_adamw"]  # its name in torch
    return chosen("from_config", name, optimizers, arguments, "halfstep_jax")(**arguments)


def _is_alias(name: str, value: object) -> bool:
    """Whether a public name is that of a whole optimizer."""
    if not inspect.isfunction(value) or name.startswith("scale_by_"):
        return False
    return next(iter(inspect.signature(value).parameters), "") == "learning_rate"
