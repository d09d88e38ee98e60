"""Errors of storing a first moment that the same step feeds back."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import Rule
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.step import Step
from halfstep_spec.rules.trace import Trace
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "every kind of first moment, beside a second one of 8 bits",
    "Nesterov": "what is fed back stands where what was stored stood",
    "Sum": "momentum, which has no second moment and no bound",
    "Bound": "a slow average in four bits, of which more would be fed back than an update may move",
    "Special": "gradients that are infinite, NaN, zero or so large that their square overflows",
}

_STEPS, _SHAPE = 6, (8, 8)
_SIZE = _SHAPE[0] * _SHAPE[1]


def cases() -> list[Case]:
    """Return the cases of error_feedback.json."""
    uroot8, e3m4, int4 = scaled("uroot8", 8, 0, 0), relative("float8_e3m4"), relative("int4", 8, 0, 0)
    fp8, int8 = scaled("float8_e4m3fn", 8, 0, 0), relative("int8", 8, 0, 0)
    grid = [(mu, uroot8) for mu in ("bfloat16", "float16", fp8, e3m4, int8, int4)]
    grid += [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        (e3m4, "ufloat16_e7m9"),
        ("float32", "float32"),
    ]
    cases = [_case(Step(_adam(mu, nu), 0.1), "Grid") for mu, nu in grid]
    cases += [_case(Step(_adam(mu, uroot8, nesterov=True), 0.1), "Nesterov") for mu in ("bfloat16", int4)]
    cases += [
        _case(Step(_adam(mu, uroot8, b1=0.99), 0.0, param_dtype="float32"), "Bound") for mu in (fp8, int4)
    ]
    cases += [_case(Step(_adam(mu, "bfloat16"), 0.1), "Special") for mu in ("bfloat16", e3m4)]
    for nesterov in (False, True):
        cases += [_case(Step(_momentum(fmt, nesterov), 0.1, "l2"), "Sum") for fmt in ("bfloat16", fp8)]
    return cases


def _adam(mu: str | Format, nu: str | Format, **others) -> ScaleByAdam:
    return ScaleByAdam(mu_dtype=mu, nu_dtype=nu, mu_rounding="feedback", seed=42, **others)


def _momentum(fmt: str | Format, nesterov: bool) -> Trace:
    return Trace(accumulator_dtype=fmt, rounding="feedback", nesterov=nesterov, seed=42)


def _case(step: Step, flag: str) -> Case:
    """Return a case of steps from zero state; the rate is large, so that fed-back errors show."""
    p = round_to(reals("paid weights", _SIZE, (-4, 0)).reshape(_SHAPE), step.param_dtype)
    g = reals("paid gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, *_SHAPE)
    if flag == "Bound":
        g[2, :, 0] *= 1000
    if flag == "Special":
        g[1, 0, :8] = [np.inf, -np.inf, np.nan, 3e38, -3e38, 2e19, 0, -0.0]
    comment = f"{step.param_dtype} weights, {describe(step.rule)}: {NOTES[flag]}"
    return step_case(step, comment, p, g, None, 0.125, (flag,), (*_clauses(step.rule), "F19"))


def _clauses(rule: Rule) -> tuple[str, ...]:
    return ("A10",) if isinstance(rule, Trace) else ("A5",)
