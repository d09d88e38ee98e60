"""Hyperparameters: checked whenever they are read, float32 from then on.

Contract: A4. Every function here names the function whose argument it checks, the value, the rule and the way
out.
"""

import math

import numpy as np
from torch import Tensor

from halfstep_torch.numbers.float_formats import dtype_name


def as_float32(caller: str, name: str, value) -> float:
    """Return a hyperparameter as the float32 number next to it.

    Args:
        caller: whose argument it is, for the message.
        name: of the argument.
        value: a Python or NumPy number, or a float32 or float64 tensor or array of one element.

    Raises:
        TypeError: for anything else.
        ValueError: for a tensor of more than one element.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        value = _one(caller, name, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{caller}: {name}={value!r} is not a number. Use a float.")
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _one(caller: str, name: str, value: Tensor | np.ndarray) -> float:
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
    return value.item()


def decay_rate(caller: str, name: str, value) -> float:
    """Return a decay rate in float32, in [0, 1)."""
    rate = as_float32(caller, name, value)
    if not 0.0 <= rate < 1.0:
        held = " in float32" if 0.0 <= float(value) < 1.0 else ""
        raise ValueError(f"{caller}: {name}={value} is outside [0, 1){held}. Use a decay rate such as 0.9.")
    return rate


def nonnegative(caller: str, name: str, value, hint: str = "Use a number >= 0.") -> float:
    """Return a hyperparameter in float32 that must be finite, and not negative."""
    number = bound(caller, name, value, hint)
    if number == math.inf:
        raise ValueError(f"{caller}: {name}={value} is infinite in float32. {hint}")
    return number


def bound(caller: str, name: str, value, hint: str = "Use a number >= 0.") -> float:
    """Return a bound in float32 that must not be negative; infinity is no bound."""
    number = as_float32(caller, name, value)
    if not number >= 0:
        problem = "negative" if number < 0 else "not a number"
        raise ValueError(f"{caller}: {name}={value} is {problem}. {hint}")
    return number


def check_order(caller: str, low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise ValueError for a lower bound above its upper bound."""
    if low > high:
        raise ValueError(
            f"{caller}: {low_name}={low:.7g} is above {high_name}={high:.7g}. "
            f"Use {low_name} <= {high_name}, or None for no bound."
        )


def several(caller: str, name: str, value, count: int) -> tuple:
    """Return as many numbers as a group entry holds, each still unchecked."""
    if isinstance(value, (tuple, list)) and len(value) == count:
        return tuple(value)
    what, example = ("pair", "(0.9, 0.999)") if count == 2 else (f"tuple of {count}", "(0.98, 0.92, 0.99)")
    raise TypeError(f"{caller}: {name}={value!r} is not a {what}. Use a {what} such as {example}.")


def pair(caller: str, name: str, value) -> tuple:
    """Return two decay rates, each still unchecked."""
    return several(caller, name, value, 2)
