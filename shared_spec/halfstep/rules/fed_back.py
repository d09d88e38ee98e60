"""What rules share that round weights themselves and feed what this leaves out into a moment (P9)."""

from collections.abc import Mapping
from typing import Any

TINY = 2.0**-100  # in place of a rate of 0, which divides nothing
MOST = 4
"""A power of two: how many times its unit an error of one gap moves a moment by at most."""
_OF_PEAK = 0.125


def largest_rate(h: Any, op: Any) -> Any:
    """Return the learning rate, or an eighth of the largest of the run: what divides errors."""
    return op.maximum(op.maximum(h.learning_rate, h.peak_lr * _OF_PEAK), TINY)


def landed(p: Any, down: Any, w: Any, q: Any, op: Any) -> Any:
    """Return q - p; -down where nothing is left out of w = p - down; -0.0 where q is p."""
    # Triton computes -x as 0 - x, which is 0 of 0, where -0.0 is meant.
    return op.where(q == w, down * -1.0, op.where(q == p, -0.0, q - p))


def check_fed_back(caller: str, arguments: Mapping[str, Any], rate: str, rounding: str) -> None:
    """Refuse a moment that cannot take what rounding leaves out of weights.

    Args:
        caller: for messages.
        arguments: of an optimizer.
        rate: the argument that is the decay rate of the moment.
        rounding: the argument that says how the moment is rounded.

    Raises:
        ValueError: for a rate of 0, which keeps nothing; for the rounding "feedback", whose update needs the
            stored moment, which is known only after the weights.
    """
    check_rate(caller, "feedback", rate, arguments.get(rate))
    if arguments[rounding] == "feedback":
        raise ValueError(
            f'{caller}: {rounding}="feedback" makes the update of what is stored, and '
            'param_storage="feedback" steps before it stores. '
            f'Leave {rounding} out, as recipe="eight_bit" by its name does, or use "stochastic".'
        )


def check_rate(caller: str, storage: str, rate: str, value: Any) -> None:
    """Raise ValueError for a first moment that keeps nothing: errors are divided by its rate."""
    if value is None or (isinstance(value, (int, float)) and value == 0):
        raise ValueError(
            f'{caller}: param_storage="{storage}" puts what rounding leaves out of weights into the first '
            f'moment, and {rate}={value} keeps nothing of it. Use a {rate} above 0, or "stochastic".'
        )
