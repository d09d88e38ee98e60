"""Hyperparameters: checked when a link is built, float32 from then on.

Contract: A4.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from halfstep import hyperparameters
from halfstep.hyperparameters import Arguments, Scalar


def as_float32(caller: str, name: str, value):
    """Return a hyperparameter in float32: a NumPy scalar, or an array of shape ().

    Float64, as `jax_enable_x64` makes of a number, is rounded to float32 as Python's numbers are.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(f"{caller}: {name}={value!r} is not a number. Use a float.")
        return np.float32(value)
    if jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{caller}: {name} is an integer array ({value.dtype}); hyperparameters are float32. "
            "Use a float, such as 1.0 for 1."
        )
    if value.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"{caller}: {name} is a {value.dtype} array; hyperparameters are float32 "
            "(0.999 in bfloat16 is 1.0). Use inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
        )
    if value.shape != ():
        raise ValueError(
            f"{caller}: {name} has shape {value.shape}; a hyperparameter is a scalar. Use shape ()."
        )
    return value.astype(np.float32) if value.dtype == np.float64 else value


def as_number(caller: str, name: str, value, check: hyperparameters.Check) -> Scalar:
    """Return a hyperparameter in float32, checked unless it is traced."""
    number = as_float32(caller, name, value)
    if not isinstance(number, Tracer):
        check(caller, name, value, float(number))
    return number


def as_nonnegative(caller: str, name: str, value, hint: str = "Use a number >= 0.") -> Scalar:
    """Return a hyperparameter in float32; it must be finite and not negative, unless it is traced."""
    return as_number(caller, name, value, functools.partial(hyperparameters.check_nonnegative, hint=hint))


def check_order(caller: str, low_name: str, low, high_name: str, high) -> None:
    """Refuse a lower bound above its upper bound, unless one is traced."""
    if not isinstance(low, Tracer) and not isinstance(high, Tracer):
        hyperparameters.check_order(caller, low_name, float(low), high_name, float(high))


def check_static(caller: str, arguments: Arguments, names: Iterable[str]) -> None:
    """Refuse arrays for numbers that `optax.inject_hyperparams` must pass on as they are."""
    arrays = [name for name in names if isinstance(arguments.get(name), jax.Array)]
    if arrays:
        raise TypeError(
            f"{caller}: {' and '.join(arrays)} {'are arrays' if len(arrays) > 1 else 'is an array'}, as "
            f"optax.inject_hyperparams makes numbers. Pass it static_args={tuple(arrays)}."
        )
