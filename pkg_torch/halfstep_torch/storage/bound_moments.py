"""The storage of a rule's moments, by the rule's fields. Contract: F1 to F3."""

import torch

from halfstep.hyperparameters import Values
from halfstep.random_words import role_of
from halfstep.rule import Moment, Rule, declared, moments_of
from halfstep.storage.moment_formats import (
    check_feedback,
    check_format,
    check_freezing,
    check_power_unit,
    check_rounding,
    check_saturation,
    check_slow_feedback,
    check_unit,
    check_weight_dtype,
    default_of,
    feeds_back,
    is_stochastic,
)
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import Shape, WordSource
from halfstep_torch.storage.state_dtypes import as_format
from halfstep_torch.storage.stored_moment import StoredMoment


def check_moments(rule: Rule, h: Values) -> None:
    """Raise ValueError for a moment that cannot be stored in the format of its rule's fields."""
    for moment in declared(type(rule)).moments.values():
        check_rounding(rule.name, moment, _rounding(rule, moment))
        # If the dtype of the weights decides, nothing can freeze yet.
        if (fmt := _format(moment, h)) is not None:
            _check(rule.name, rule, moment, fmt, h, moment.rate)


def bound_moments(
    caller: str, rule: Rule, h: Values, dtype: torch.dtype, shape: Shape
) -> tuple[StoredMoment, ...]:
    """Return the storage of a parameter's moments, in the order of their declaration."""
    moments = moments_of(rule).values()
    return tuple(_bound(caller, rule, moment, h, dtype, shape) for moment in moments)


def _bound(
    caller: str, rule: Rule, moment: Moment, h: Values, dtype: torch.dtype, shape: Shape
) -> StoredMoment:
    fmt = _format(moment, h) or Format.of(default_of(moment, dtype_name(dtype)))
    check_weight_dtype(caller, moment, "", dtype_name(dtype))
    check_rounding(caller, moment, _rounding(rule, moment))
    _check(caller, rule, moment, fmt, h, _rate_name(rule, moment))
    fmt = fmt.for_shape(moment.shape_for(rule.name, shape))
    stochastic = is_stochastic(moment, fmt, _rounding(rule, moment), _rate(moment, h))
    source = WordSource(role_of(moment.name)) if stochastic else None
    return StoredMoment(
        name=moment.name,
        key=moment.torch,
        format=fmt,
        source=source,
        keep_nonzero="never" if moment.signed else "always",
        shape_of=moment.shape,
        unit=moment.unit if fmt.relative else "",
        feeds_back=feeds_back(fmt, _rounding(rule, moment)),
        second=moment.unit,
        copies_weights=moment.copies_weights,
    )


def _check(caller: str, rule: Rule, moment: Moment, fmt: Format, h: Values, rate_name: str) -> None:
    """Raise ValueError if a format cannot represent the moment (contract F2), or freezes it (F3)."""
    check_format(caller, moment, fmt)
    check_freezing(caller, moment, fmt, _rounding(rule, moment), _rate(moment, h), rate_name)
    check_slow_feedback(caller, moment, fmt, _rounding(rule, moment), _rate(moment, h), rate_name)
    moments = declared(type(rule)).moments.values()
    check_saturation(caller, moment, fmt, [(other, _format(other, h)) for other in moments])
    if fmt.relative and not fmt.scaled:
        unit = declared(type(rule)).moments[moment.unit]
        check_power_unit(caller, moment, fmt, unit, _format(unit, h))
        check_feedback(caller, moment, _rounding(rule, moment), unit, _format(unit, h))
        rates, names = zip(*((_rate(x, h), _rate_name(rule, x)) for x in (moment, unit)), strict=True)
        check_unit(caller, moment, unit, rates, names)


def _format(moment: Moment, h: Values) -> Format | None:
    """Return the requested format, or None if the dtype of the weights decides."""
    return getattr(h, moment.dtype) if moment.dtype else as_format("", moment.name, moment.always or None)


def _rounding(rule: Rule, moment: Moment) -> str:
    return getattr(rule, moment.rounding) if moment.rounding else "auto"


def _rate(moment: Moment, h: Values) -> float:
    return getattr(h, moment.rate) if moment.rate else 0.0


def _rate_name(rule: Rule, moment: Moment) -> str:
    """Return the name of a moment's decay rate in a param group."""
    entry = declared(type(rule)).numbers[moment.rate].torch if moment.rate else ""
    return moment.rate if not entry or "[" in entry else entry
