"""Functions for rules that round weights themselves and feed the errors back into a moment (P9)."""

from collections.abc import Iterable

from halfstep.hyperparameters import Arguments, Scalar, check_decay_rate
from halfstep.numbers import Count, Number, Numbers
from halfstep.op import NumbersOp, Op

AHEAD_BITS = 7
AHEAD = 2**AHEAD_BITS
"""Number of coming rates that are read. The last rate is assumed to stay after them."""
TINY = 2.0**-100  # in place of a rate of 0, which divides nothing
_SMALLEST = 2.0**-20  # of decay rates, so that no power is subnormal
MOST = 4
"""Exponent k: an error of one gap moves a moment by at most 2^k times its unit."""
_OF_PEAK, _OF_PEAK_UNKNOWN = 1 / 32, 1 / 4  # the least divisor, if the rates are known or not
_ROSE = 8


def share_of_errors(
    rate: Number, h: Numbers, t: Count, op: NumbersOp, nesterov: bool, unbias: Number | None = None
) -> Number:
    """Return 1 / s, where later steps add s to a weight for each 1 in the moment (contract A21).

    With `unbias`, the bias corrections at the later steps, s = sum_k rate^k lr(t + k) unbias_k. Without a
    schedule, the rates are assumed to rise from 0 on a line through the current rate, up to the largest rate.
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
    # If the rate is 0 and its rise is unknown, an error stored now would not come back in proportion.
    return op.float32(most > 0) / op.maximum(most, TINY)


def _discounted(x: Number, b: Number, op: NumbersOp) -> Number:
    """Return the infinite sum over b^k x_k, in which the last x repeats. It is added by pairs."""
    last, power = x, b
    for _ in range(AHEAD_BITS):
        even, odd = op.halves(x)
        x, last = even + power * odd, op.halves(last)[1]
        power = op.maximum(power, _SMALLEST)
        power = power * power
    return x + power * (last / (1 - b))


def rate_that_rose(rate: float, largest: float, way_out: str) -> str:
    """Return a warning if a rate is more than 8 times the largest rate known before, else "".

    Errors were divided by the known rates, and come back multiplied by the rates that follow.
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
    """Return q - p, which is -down if w = p - down was rounded exactly and -0.0 if q is p."""
    # If q is p, p - q is 0.0. p + 0.0 is used because -0.0 - 0.0 is -0.0. Triton's -x is 0 - x.
    return op.where(q == w, down, (p + 0.0) - q) * -1.0


def check_kept(caller: str, name: str, value: Scalar, number: float) -> None:
    """Raise an error for a decay rate of 0, by which errors are divided, and as in `check_decay_rate`."""
    check_decay_rate(caller, name, value, number)
    if number == 0:
        raise ValueError(
            f"{caller}: param_storage puts what rounding leaves out of weights into the first moment, and "
            f"{name}={value} keeps nothing of it. Use a number above 0, or another param_storage."
        )


def check_whole(caller: str, storage: str, names: Iterable[str], arguments: Arguments) -> None:
    """Raise an error for arguments that belong to other links, because one rule is the whole step."""
    for name in names:
        if arguments.get(name):
            raise ValueError(
                f'{caller}: param_storage="{storage}" takes the whole step of AdamW by one rule, without '
                f"{name}. Leave it out, or partition the params."
            )


def check_fed_back(caller: str, arguments: Arguments, rounding: str) -> None:
    """Raise an error for a moment with rounding "feedback", whose update needs the moment as stored.

    Args:
        caller: name for messages.
        arguments: arguments of an optimizer.
        rounding: name of the argument with the moment's rounding.

    Raises:
        ValueError: if the rounding is "feedback", because the rule steps before it stores.
    """
    if arguments[rounding] == "feedback":
        raise ValueError(
            f'{caller}: {rounding}="feedback" makes the update of what is stored, and '
            'param_storage="feedback" steps before it stores. '
            f'Leave {rounding} out, as recipe="eight_bit" by its name does, or use "stochastic".'
        )
