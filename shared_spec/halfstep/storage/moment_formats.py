"""What a moment's format and rounding are refused for, and which rounding "auto" is. Contract: F1 to F3."""

from collections.abc import Mapping
from typing import Any

from halfstep.storage.formats import Format

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")


def check_rounding(caller: str, argument: str, rounding: Any) -> None:
    """Raise ValueError for what is no rounding."""
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"{caller}: {argument}={rounding!r} is not a rounding. "
            'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
        )


def check_format(caller: str, argument: str, fmt: Format, *, name: str, signed: bool, unit: str) -> None:
    """Raise ValueError for a format that cannot hold a moment.

    Args:
        caller: whose argument it is, and
        argument: which one, for the message.
        fmt: that was asked for.
        name: of the moment.
        signed: whether it has a sign; a second moment has none.
        unit: the second moment whose root may be its unit; "" for none.
    """
    if signed and not fmt.signed:
        raise ValueError(
            f"{caller}: {argument}={fmt.dtype} has no sign. "
            f"Use it for nu, and a signed format for {argument.removesuffix('_dtype')}."
        )
    if fmt.relative and not unit:
        raise ValueError(
            f"{caller}: {argument}=relative(...) needs a second moment beside {name}. "
            "Use it for mu of Adam or LAMB, and scaled(...) here."
        )
    if not signed and not fmt.for_second_moments:
        raise ValueError(
            f"{caller}: {argument}={fmt.dtype} cannot hold a second moment: "
            "it loses small ones or lifts them by orders, and steps are too long or too short. "
            'Use "bfloat16", scaled("float16"), scaled("ufloat8_e5m3") or codebook("udynamic8").'
        )


def check_freezing(caller: str, fmt: Format, rounding: str, rate: Any, names: Mapping[str, str]) -> None:
    """Raise ValueError where rounding to nearest would freeze an average.

    Args:
        caller: whose arguments they are.
        fmt: of the average.
        rounding: one of `ROUNDINGS`.
        rate: its decay rate, a float32 number; None where it is not known.
        names: of the arguments "dtype", "rounding" and "rate", for the message.
    """
    if rounding == "nearest" and rate is not None and fmt.freezes(rate):
        raise ValueError(
            f'{caller}: {names["dtype"]}={fmt.dtype} with {names["rounding"]}="nearest" freezes '
            f"at {names['rate']}={float(rate):.7g} (1-{names['rate']} < {fmt.half_gap}). "
            f'Use {names["rounding"]}="stochastic", or {names["dtype"]}="float32".'
        )


def is_stochastic(fmt: Format, rounding: str, rate: Any, is_average: bool) -> bool:
    """Whether a moment is rounded stochastically: with "auto" where nearest would fall short.

    Args:
        fmt: of the moment.
        rounding: one of `ROUNDINGS`.
        rate: its decay rate; None where it is not known.
        is_average: whether it has one.
    """
    if not fmt.rounds:
        return False
    if rounding == "auto":
        return is_average and (rate is None or fmt.falls_short(rate))
    return rounding == "stochastic"
