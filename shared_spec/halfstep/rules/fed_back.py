"""What rules share that round weights themselves and feed what this leaves out into a moment (P9)."""

from collections.abc import Iterable

from halfstep.hyperparameters import Arguments, Scalar, check_decay_rate
from halfstep.numbers import Count, Number, Numbers
from halfstep.op import NumbersOp, Op

AHEAD_BITS = 7
AHEAD = 2**AHEAD_BITS
"""How many coming rates are read; the last one stays after these."""
TINY = 2.0**-100  # in place of a rate of 0, which divides nothing
_SMALLEST = 2.0**-20  # of decay rates, so that no power is subnormal
MOST = 4
"""A power of two: how many times its unit an error of one gap moves a moment by at most."""
_OF_PEAK, _OF_PEAK_UNKNOWN = 1 / 32, 1 / 4  # the least that divides, where rates are known or not
_ROSE = 8


def share_of_errors(
    rate: Number, h: Numbers, t: Count, op: NumbersOp, nesterov: bool, unbias: Number | None = None
) -> Number:
    """Return 1 / s, s what later steps make of 1 in a moment of this decay rate (contract A21).

    With `unbias`, the corrections of bias of these steps, s = sum_k rate^k lr(t + k) unbias_k. Where no
    schedule gives the rates, they rise from 0 on a line, through that of this step, up to the largest.
    """
    rates, of_peak = op.coming("learning_rate", AHEAD), _OF_PEAK
    if rates is None:
        of_peak, now = _OF_PEAK_UNKNOWN, h.learning_rate
        rise = 1 + op.steps(AHEAD) / op.float32(t)
        rates = op.minimum(now * rise, op.maximum(h.peak_lr, now))
    b = op.maximum(rate, _SMALLEST)
    later = b * b if nesterov else b
    total = later * _discounted(rates if unbias is None else rates * unbias, b, op)
    least = (later / (1 - b)) * (h.peak_lr * of_peak)
    most = op.maximum(total, least)
    # A rate of 0 whose rise is not known: nothing that is stored now would come back in proportion.
    return op.float32(most > 0) / op.maximum(most, TINY)


def _discounted(x: Number, b: Number, op: NumbersOp) -> Number:
    """Return the sum of b^k x_k, whose last x stays for ever: by pairs, and pairs of these."""
    last, power = x, b
    for _ in range(AHEAD_BITS):
        even, odd = op.halves(x)
        x, last = even + power * odd, op.halves(last)[1]
        power = op.maximum(power, _SMALLEST)
        power = power * power
    return x + power * (last / (1 - b))


def rate_that_rose(rate: float, largest: float, way_out: str) -> str:
    """Return what a rate means that is far above the largest one known before; "" up to 8 times of it.

    Errors were divided by what was known, and come back times the rates that follow.
    """
    if not 0 < largest * _ROSE < rate:
        return ""
    return (
        f"the learning rate is {rate:.4g}, more than {_ROSE} times the largest that was known "
        f"({largest:.4g}). "
        "Rounding errors of weights that were fed back come back larger than they were. "
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
