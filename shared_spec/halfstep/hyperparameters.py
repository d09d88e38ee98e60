"""Checks for hyperparameters, which each framework converts to float32 first. Contract: A4.

A check gets (caller, name, value as given, float32 number) and raises ValueError. A framework skips it if the
number is not known yet, as under a trace.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Scalar: TypeAlias = Any
"""A hyperparameter as a user passes it: a number, an array with one element, or a function of the count."""
Arguments: TypeAlias = Mapping[str, Any]
"""Unchecked arguments of an optimizer or a link, by name."""
Values: TypeAlias = Any
"""Values of a rule's fields, or numbers for a step, as a named tuple with a class made at run time."""
Check = Callable[[str, str, Scalar, float], None]

PEAK_COUNTS = tuple(sorted({round(1.05**k) - 1 for k in range(331)}))
"""Step counts at which the largest value of a schedule is searched, up to 10^7, 5 % apart."""


def check_decay_rate(caller: str, name: str, value: Scalar, number: float) -> None:
    """Raise ValueError for a decay rate outside [0, 1)."""
    if not 0.0 <= number < 1.0:
        rounded = " in float32" if 0.0 <= float(value) < 1.0 else ""
        raise ValueError(
            f"{caller}: {name}={value} is outside [0, 1){rounded}. "
            f"Use a decay rate such as {'0.999' if name.endswith(('2', '[1]')) else '0.9'}."
        )


def check_bound(
    caller: str, name: str, value: Scalar, number: float, hint: str = "Use a number >= 0."
) -> None:
    """Raise ValueError for a negative number and NaN. Infinity means no bound."""
    if not number >= 0:
        problem = "negative" if number < 0 else "not a number"
        raise ValueError(f"{caller}: {name}={value} is {problem}. {hint}")


def check_nonnegative(
    caller: str, name: str, value: Scalar, number: float, hint: str = "Use a number >= 0."
) -> None:
    """Raise ValueError for a negative number, NaN and infinity."""
    check_bound(caller, name, value, number, hint)
    if number == math.inf:
        raise ValueError(f"{caller}: {name}={value} is infinite in float32. {hint}")


def check_count(caller: str, name: str, value: Scalar, number: float) -> None:
    """Raise ValueError unless a value is a whole number >= 0, such as a step count."""
    hint = "Use a whole number of steps, such as 1000, or 0."
    check_nonnegative(caller, name, value, number, hint)
    if number != math.floor(number):
        raise ValueError(f"{caller}: {name}={value} is not whole. {hint}")


def check_order(caller: str, low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise ValueError if a lower bound is above its upper bound."""
    if low > high:
        raise ValueError(
            f"{caller}: {low_name}={low:.7g} is above {high_name}={high:.7g}. "
            f"Use {low_name} <= {high_name}, or None for no bound."
        )


def several(caller: str, name: str, value: Scalar, count: int) -> tuple:
    """Return the unchecked values in an entry with several values, which may be any sequence."""
    ordered = isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))
    if ordered and len(value) == count:
        return tuple(value)
    what, example = ("pair", "(0.9, 0.999)") if count == 2 else (f"tuple of {count}", "(0.98, 0.92, 0.99)")
    raise TypeError(f"{caller}: {name}={value!r} is not a {what}. Use a {what} such as {example}.")
