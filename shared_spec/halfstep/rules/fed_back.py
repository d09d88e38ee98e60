"""What rules share that round weights themselves and feed what this leaves out into a moment (P9)."""

from collections.abc import Iterable

from halfstep.hyperparameters import Arguments, Scalar, check_decay_rate
from halfstep.numbers import Number, Numbers
from halfstep.op import NumbersOp, Op

TINY = 2.0**-100  # in place of a rate of 0, which divides nothing
MOST = 4
"""A power of two: how many times its unit an error of one gap moves a moment by at most."""
_OF_PEAK = 0.125


def largest_rate(h: Numbers, op: NumbersOp) -> Number:
    """Return the learning rate, or an eighth of the largest of the run: what divides errors."""
    return op.maximum(op.maximum(h.learning_rate, h.peak_lr * _OF_PEAK), TINY)


def rate_that_rose(rate: float, largest: float, way_out: str) -> str:
    """Return what a rate means that is far above the largest one known before; "" up to 8 times of it.

    Errors were divided by an eighth of the largest rate at least, and come back times the rates that follow.
    """
    if not 0 < largest < rate * _OF_PEAK:
        return ""
    return (
        f"the learning rate is {rate:.4g}, more than 8 times the largest that was known ({largest:.4g}). "
        'Under param_storage="feedback" earlier rounding errors come back larger than they were. '
        f"{way_out}"
    )


def emitted(p: Number, down: Number, w: Number, q: Number, op: Op) -> Number:
    """Return q - p; -down where nothing is left out of w = p - down; -0.0 where q is p."""
    # Where q is p, p - q is 0.0; p + 0.0, because of -0.0 less 0.0 it would be -0.0. Triton's -x is 0 - x.
    return op.where(q == w, down, (p + 0.0) - q) * -1.0


def check_kept(caller: str, name: str, value: Scalar, number: float) -> None:
    """Refuse a decay rate of 0 beside what `check_decay_rate` refuses: errors are divided by it."""
    check_decay_rate(caller, name, value, number)
    if number == 0:
        raise ValueError(
            f"{caller}: param_storage puts what rounding leaves out of weights into the first moment, and "
            f"{name}={value} keeps nothing of it. Use a number above 0, or another param_storage."
        )


def check_whole(caller: str, storage: str, names: Iterable[str], arguments: Arguments) -> None:
    """Refuse arguments of links that are not there: one rule takes the whole step."""
    for name in names:
        if arguments.get(name):
            raise ValueError(
                f'{caller}: param_storage="{storage}" takes the whole step of AdamW by one rule, without '
                f"{name}. Leave it out, or partition the params."
            )


def check_fed_back(caller: str, arguments: Arguments, rounding: str) -> None:
    """Refuse the rounding "feedback" of a moment: its update needs what is stored, and that comes later.

    Args:
        caller: for messages.
        arguments: of an optimizer.
        rounding: the argument that says how the moment is rounded.

    Raises:
        ValueError: for that rounding.
    """
    if arguments[rounding] == "feedback":
        raise ValueError(
            f'{caller}: {rounding}="feedback" makes the update of what is stored, and '
            'param_storage="feedback" steps before it stores. '
            f'Leave {rounding} out, as recipe="eight_bit" by its name does, or use "stochastic".'
        )
