"""What a number given by a caller may be, and the errors that say so.

Every function here names the function whose argument it checks, the value, the rule and the way out. A
hyperparameter becomes float32 here, once (contract A4).
"""

import math

import numpy as np
from torch import Tensor

from halfstep_torch.rounding import dtype_name


def float32_number(function: str, name: str, value) -> float:
    """Return a hyperparameter as the float32 number next to it.

    Args:
        function: whose argument it is, for the message.
        name: of the argument.
        value: a Python or NumPy number, or a float32 tensor of one element.

    Raises:
        TypeError: for anything else.
        ValueError: for NaN, infinity, or what is infinite in float32.
    """
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and not isinstance(value, float):
        value = _one_float32(function, name, value)
    elif not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{function}: {name}={value!r} is not a number. Use a float.")
    with np.errstate(over="ignore"):
        number = float(np.float32(value))
    if not math.isfinite(number):
        raise ValueError(f"{function}: {name}={value} is not finite in float32. Use a finite number.")
    return number


def _one_float32(function: str, name: str, value) -> float:
    dtype = dtype_name(value.dtype)
    if dtype != "float32":
        because = " (0.999 in bfloat16 is 1.0)" if dtype == "bfloat16" else ""
        article = "an" if dtype[0] in "aeiou" else "a"
        raise TypeError(
            f"{function}: {name} is {article} {dtype} {'tensor' if isinstance(value, Tensor) else 'array'}; "
            f"hyperparameters are float32{because}. Use a float, or a float32 tensor."
        )
    if math.prod(value.shape) != 1:
        raise TypeError(f"{function}: {name} has shape {tuple(value.shape)}. Use one number.")
    return value.item()


def check_decay_rate(function: str, name: str, value) -> float:
    """Return a decay rate as a float32 number in [0, 1)."""
    b = float32_number(function, name, value)
    if not 0.0 <= b < 1.0:
        inside = " in float32" if 0.0 <= float(value) < 1.0 else ""
        raise ValueError(
            f"{function}: {name}={value} is outside [0, 1){inside}. Use a decay rate such as 0.9."
        )
    return b


def check_not_negative(function: str, name: str, value, way_out: str = "Use a number >= 0.") -> float:
    """Return a number that must not be negative, as float32."""
    number = float32_number(function, name, value)
    if number < 0:
        raise ValueError(f"{function}: {name}={value} is negative. {way_out}")
    return number


def check_pair(function: str, name: str, value) -> tuple:
    """Return two decay rates, unchecked each."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{function}: {name}={value!r} is not a pair. Use a pair such as (0.9, 0.999).")
    return tuple(value)
