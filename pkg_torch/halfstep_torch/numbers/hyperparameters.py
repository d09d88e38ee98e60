"""Hyperparameters: checked whenever they are read, float32 from then on.

Contract: A4. Every function here names the function whose argument it checks, the value, the rule and the way
out.
"""

import numpy as np
from torch import Tensor

from halfstep_torch.numbers.float_formats import dtype_name


def as_float32(function: str, name: str, value) -> float:
    """Return a hyperparameter as the float32 number next to it.

    Args:
        function: whose argument it is, for the message.
        name: of the argument.
        value: a Python or NumPy number, or a float32 tensor or array of one element.

    Raises:
        TypeError: for anything else.
        ValueError: for a tensor of more than one element.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        value = _one_float32(function, name, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{function}: {name}={value!r} is not a number. Use a float.")
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _one_float32(function: str, name: str, value: Tensor | np.ndarray) -> float:
    kind, dtype = "tensor" if isinstance(value, Tensor) else "array", dtype_name(value.dtype)
    if dtype != "float32":
        raise TypeError(
            f"{function}: {name} is a {dtype} {kind}; hyperparameters are float32 (0.999 in bfloat16 is "
            "1.0). Use a float, or a float32 tensor."
        )
    if tuple(value.shape) not in ((), (1,)):
        raise ValueError(
            f"{function}: {name} has shape {tuple(value.shape)}; a hyperparameter is a scalar. Use shape ()."
        )
    return value.item()


def decay_rate(function: str, name: str, value) -> float:
    """Return a decay rate in float32, in [0, 1)."""
    rate = as_float32(function, name, value)
    if not 0.0 <= rate < 1.0:
        held = " in float32" if 0.0 <= float(value) < 1.0 else ""
        raise ValueError(f"{function}: {name}={value} is outside [0, 1){held}. Use a decay rate such as 0.9.")
    return rate


def nonnegative(function: str, name: str, value, way_out: str = "Use a number >= 0.") -> float:
    """Return a hyperparameter in float32 that must not be negative."""
    number = as_float32(function, name, value)
    if not number >= 0:
        fault = "negative" if number < 0 else "not a number"
        raise ValueError(f"{function}: {name}={value} is {fault}. {way_out}")
    return number


def check_order(function: str, low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise ValueError for a lower bound above its upper bound."""
    if low > high:
        raise ValueError(
            f"{function}: {low_name}={low:.7g} is above {high_name}={high:.7g}. "
            f"Use {low_name} <= {high_name}, or None for no bound."
        )


def pair(function: str, name: str, value) -> tuple:
    """Return two decay rates, each still unchecked."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{function}: {name}={value!r} is not a pair. Use a pair such as (0.9, 0.999).")
    return tuple(value)
