"""How the moments of a rule are stored, given what its fields say. Contract: F1 to F3."""

from typing import Any

import torch

from halfstep.rule import ROUNDINGS, Moment, Rule, declared
from halfstep_torch.numbers.random_words import role_of
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.relative import LARGEST_BOUND, bound
from halfstep_torch.storage.state_array import Shape, WordSource
from halfstep_torch.storage.state_dtypes import default_format
from halfstep_torch.storage.stored_moment import StoredMoment


def check_moments(rule: Rule, h: Any) -> None:
    """Refuse a moment that cannot be stored as the fields of its rule say.

    Args:
        rule: whose moments they are.
        h: its hyperparameters and formats, by field.

    Raises:
        ValueError: for what is no rounding, cannot hold the moment, or would freeze it.
    """
    for moment in declared(type(rule)).moments.values():
        _check_rounding(rule.name, rule, moment)
        # Where the dtype of the weights decides, nothing can freeze yet.
        if (fmt := _format(moment, h)) is not None:
            _check(rule.name, rule, moment, fmt, h, moment.rate)


def bound_moments(
    caller: str, rule: Rule, h: Any, dtype: torch.dtype, shape: Shape
) -> tuple[StoredMoment, ...]:
    """Return how the moments of a parameter are stored, in the order of their declaration.

    Args:
        caller: for messages.
        rule: whose moments they are.
        h: its hyperparameters and formats, by field.
        dtype: of the weights.
        shape: of the parameter.

    Raises:
        ValueError: for what is no rounding, cannot hold a moment, or would freeze it.
    """
    moments = declared(type(rule)).moments.values()
    return tuple(_bound(caller, rule, moment, h, dtype, shape) for moment in moments)


def _bound(caller: str, rule: Rule, moment: Moment, h: Any, dtype: torch.dtype, shape: Shape) -> StoredMoment:
    fmt = _format(moment, h) or default_format(dtype)
    _check_rounding(caller, rule, moment)
    _check(caller, rule, moment, fmt, h, _rate_name(rule, moment))
    fmt = fmt.for_shape(_shape(rule, moment, shape))
    rounding = _rounding(rule, moment)
    # "auto" is nearest unless that falls short.
    short = rounding == "auto" and bool(moment.rate) and fmt.falls_short(_rate(moment, h))
    source = WordSource(role_of(moment.name)) if fmt.rounds and (rounding == "stochastic" or short) else None
    return StoredMoment(
        name=moment.name,
        key=moment.torch,
        format=fmt,
        source=source,
        keep_nonzero="never" if moment.signed else "always",
        shape_of=moment.shape,
        unit=moment.unit if fmt.relative else "",
    )


def _check_rounding(caller: str, rule: Rule, moment: Moment) -> None:
    rounding = _rounding(rule, moment)
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"{caller}: {moment.rounding}={rounding!r} is not a rounding. "
            'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
        )


def _check(caller: str, rule: Rule, moment: Moment, fmt: Format, h: Any, rate_name: str) -> None:
    """Refuse a format that cannot hold the moment (contract F2), or would freeze it (F3)."""
    if fmt.relative and not moment.unit:
        raise ValueError(
            f"{caller}: {moment.dtype}=relative(...) needs a second moment beside {moment.name}. "
            "Use it for mu of Adam or Lamb, and scaled(...) here."
        )
    if not moment.signed and not fmt.codes.for_second_moments:
        raise ValueError(
            f"{caller}: {moment.dtype}={fmt.name} cannot hold a second moment: "
            "it loses small ones or lifts them by orders, and steps are too long or too short. "
            'Use "bfloat16", scaled("float16"), scaled("ufloat8_e5m3") or codebook("udynamic8").'
        )
    rate = _rate(moment, h)
    if _rounding(rule, moment) == "nearest" and fmt.freezes(rate):
        raise ValueError(
            f'{caller}: {moment.dtype}={fmt.name} with {moment.rounding}="nearest" freezes at '
            f"{rate_name}={rate:.7g} (1-{rate_name} < {fmt.codes.half_gap[1]}). "
            f'Use {moment.rounding}="stochastic", or {moment.dtype}="float32".'
        )
    if fmt.relative and not fmt.scaled:
        _check_unit(caller, rule, moment, h)


def _check_unit(caller: str, rule: Rule, moment: Moment, h: Any) -> None:
    """Refuse a moment in units of a root, past what its codes without scales hold."""
    unit = declared(type(rule)).moments[moment.unit]
    b1, b2 = _rate(moment, h), _rate(unit, h)
    largest = bound(b1, b2)
    if largest > LARGEST_BOUND:
        raise ValueError(
            f"{caller}: {moment.dtype} has no scale, and {moment.name} reaches {largest:.3g} roots of "
            f"{unit.name} at {_rate_name(rule, moment)}={b1:.7g} and {_rate_name(rule, unit)}={b2:.7g}. "
            "Use relative(..., block_size=128)."
        )


def _shape(rule: Rule, moment: Moment, shape: Shape) -> Shape:
    """Return the shape of a moment of such a parameter."""
    given = moment.shape(shape) if moment.shape else shape
    if not isinstance(given, tuple) or not all(isinstance(size, int) and size >= 0 for size in given):
        raise ValueError(
            f"{rule.name}: the shape of {moment.name} is {given!r} for a parameter of shape {shape}. "
            "Return a tuple of sizes from shape=..."
        )
    return given


def _format(moment: Moment, h: Any) -> Format | None:
    """Return the format that was asked for; None where the dtype of the weights decides."""
    return getattr(h, moment.dtype) if moment.dtype else None


def _rounding(rule: Rule, moment: Moment) -> str:
    return getattr(rule, moment.rounding) if moment.rounding else "auto"


def _rate(moment: Moment, h: Any) -> float:
    return getattr(h, moment.rate) if moment.rate else 0.0


def _rate_name(rule: Rule, moment: Moment) -> str:
    """Return what the decay rate of a moment is called in a param group."""
    entry = declared(type(rule)).numbers[moment.rate].torch if moment.rate else ""
    return moment.rate if not entry or "[" in entry else entry
