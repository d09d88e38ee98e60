"""Hyperparameters, checked whenever they are read, and float32 from then on. Contract: A4."""

import functools
import math

import numpy as np
from torch import Tensor

from halfstep.hyperparameters import Check, Scalar, check_bound, check_decay_rate, check_nonnegative
from halfstep_torch.numbers.float_formats import dtype_name


def as_float32(caller: str, name: str, value: Scalar) -> float:
    """Return a hyperparameter as the nearest float32 number.

    `value` is a Python or NumPy number, or a float32 or float64 tensor or array with one element.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        value = _element(caller, name, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{caller}: {name}={value!r} is not a number. Use a float.")
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _element(caller: str, name: str, value: Tensor | np.ndarray) -> float:
    kind, dtype = "tensor" if isinstance(value, Tensor) else "array", dtype_name(value.dtype)
    if dtype not in ("float32", "float64"):
        raise TypeError(
            f"{caller}: {name} is a {dtype} {kind}; hyperparameters are float32 (0.999 in bfloat16 is "
            "1.0). Use a float, or a float32 tensor."
        )
    if math.prod(value.shape) != 1:
        raise ValueError(
            f"{caller}: {name} has shape {tuple(value.shape)}; a hyperparameter is a scalar. Use shape ()."
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise ValueError(
            f"{caller}: {name} is on the device meta, without a number. Use a float, or load the file "
            "without map_location='meta'."
        )
    return value.item()


def checked(caller: str, name: str, value: Scalar, check: Check) -> float:
    """Return a checked hyperparameter in float32."""
    number = as_float32(caller, name, value)
    check(caller, name, value, number)
    return number


decay_rate = functools.partial(checked, check=check_decay_rate)
bound = functools.partial(checked, check=check_bound)


def nonnegative(caller: str, name: str, value: Scalar, hint: str = "Use a number >= 0.") -> float:
    """Return a hyperparameter in float32 that must be finite, and not negative."""
    return checked(caller, name, value, functools.partial(check_nonnegative, hint=hint))
