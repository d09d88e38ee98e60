"""Hyperparameters: checked when a link is built, float32 once and for all.

Contract: A4.
"""

import jax
import jax.numpy as jnp
import numpy as np


def as_float32(function: str, name: str, value):
    """Return a hyperparameter as a float32 scalar.

    Args:
        function: whose argument it is, and
        name: which one, for the error.
        value: a number, or a float32 array of shape (), which may be traced.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(value, jax.Array | np.ndarray):
        if value.dtype != jnp.float32:
            raise TypeError(
                f"{function}: {name} is a {value.dtype} array; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
                "Use inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
            )
        if value.shape != ():
            raise ValueError(
                f"{function}: {name} has shape {value.shape}; a hyperparameter is a scalar. Use shape ()."
            )
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(
            f"{function}: {name}={value!r} is not a number. Use a float, or a float32 array of shape ()."
        )
    return np.float32(value)


def decay_rate(function: str, name: str, value):
    """Return a decay rate as float32: in [0, 1), where its value can be read now.

    Raises:
        TypeError: as `as_float32`.
        ValueError: if it is out of range.
    """
    rate = as_float32(function, name, value)
    number = known(rate)
    if number is not None and not 0 <= number < 1:
        raise ValueError(f"{function}: {name}={value} is outside [0, 1). Use a decay rate such as 0.9.")
    return rate


def nonnegative(function: str, name: str, value, way_out: str = "Use a number >= 0."):
    """Return a hyperparameter as float32: not negative, where its value can be read now.

    Raises:
        TypeError: as `as_float32`.
        ValueError: if it is negative or NaN.
    """
    number = known(rate := as_float32(function, name, value))
    if number is not None and not number >= 0:
        raise ValueError(f"{function}: {name}={value} is negative. {way_out}")
    return rate


def known(value) -> float | None:
    """Return the value of a scalar, or None where it is traced."""
    return None if isinstance(value, jax.core.Tracer) else float(value)
