"""First moments in units of the root of the second one, and integers under fine scales."""

import numpy as np

from halfstep_spec.cases.formats import encode_case, format_inputs
from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lamb import Lamb
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.relative import relative, to_unit
from halfstep_spec.storage.relative_codes import FINE_CODES, FIXED_CODES
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Sample": "values over several binades, two blocks a row, the second one short",
    "Extremes": "blocks of zeros, of equal values, of more binades than codes have, of the largest floats",
    "NotFinite": "NaN and infinities in some blocks and not in others",
    "Positive": "magnitudes over fifty binades",
    "Largest": "numbers up to the largest float, which saturate",
    "Grid": "every code of mu with a nu of its kind",
    "Still": "a coordinate that never got a gradient, and one whose gradients stop",
    "Burst": "a gradient a thousand times the others: past the range of codes without a scale",
    "Unit": "second moments of zero, subnormal, and next to the smallest normal number",
    "Fine": "int8 under a fine scale, not relative",
}

_STEPS, _SHAPE = 5, (8, 6)


def cases() -> list[Case]:
    """Return the cases of relative.json."""
    return [_unit_case(), *_encode_cases(), *_step_cases()]


def _unit_case() -> Case:
    """Return z of every v in question, next to the smallest normal number above all."""
    smallest = 2.0**-126
    v = [0.0, 2.0**-149, smallest / 2, smallest - 2.0**-149, smallest, smallest + 2.0**-149, 1e-30, 0.3, 9.0]
    v = np.repeat(np.array([*v, np.nan], np.float32), 2)
    m = reals("numerators", v.size, (-40, -20))
    outputs = {"z": Array.of(to_unit(m, v), compare="bits")}
    comment = "z = m / sqrt(v), and 0 where v is below 2^-126"
    return Case("to_unit", comment, {}, {"m": Array.of(m), "v": Array.of(v)}, outputs, ("Unit",), ("F12",))


def _encode_cases():
    formats = [relative(name) for name in FIXED_CODES]
    formats += [relative(name, 8, min_size=0, min_ndim=0) for name in FINE_CODES]
    for fmt in formats:
        for flag, x in format_inputs(signed=True).items():
            for rounding in ("nearest", "stochastic"):
                # In the unit of a root nothing is near the largest float.
                z = x if fmt.scaled else np.clip(x, np.float32(-(2.0**100)), np.float32(2.0**100))
                z = np.where(np.isinf(x), x, z)
                yield encode_case(fmt, flag, z, rounding, NOTES, second=False)
    yield encode_case(scaled("int8", None, 0, 0, "fine"), "Sample", _sample(), "stochastic", NOTES)
    for name in FIXED_CODES:
        yield encode_case(relative(name), "Largest", _largest(), "stochastic", NOTES, second=False)


def _largest() -> np.ndarray:
    """Return numbers about the largest code, and about the largest float over either scale."""
    powers = np.array([[7.5, 8.0, 2.0**100, 2.0**123], [2.0**124, 2.0**126, 2.0**127, 1.999 * 2.0**127]])
    return np.stack([powers, -powers]).astype(np.float32)


def _sample() -> np.ndarray:
    return format_inputs(signed=True)["Sample"]


def _step_cases():
    e7m9, e5m3 = "ufloat16_e7m9", scaled("ufloat8_e5m3", 8, 0, 0)
    int4 = relative("int4", 8, 0, 0)
    fixed = [relative(name) for name in FIXED_CODES]
    grid = [(mu, nu) for mu in fixed for nu in ("float32", "bfloat16", e7m9) if not mu.power_unit]
    grid += [(relative("int8", 8, 0, 0), e5m3), (int4, e5m3), (int4, "float32")]
    for mu, nu in grid:
        for rounding in ("auto", "nearest"):
            yield _case(Step(_adam(mu, nu, rounding), 0.1), "Grid")
    e3m4 = relative("float8_e3m4")
    for flag in ("Still", "Burst"):
        for mu in (e3m4, int4):
            yield _case(Step(_adam(mu, e7m9, "auto"), 0.1), flag)
    yield _case(Step(_adam(e3m4, e7m9, "auto", nesterov=True), 0.1), "Grid")
    yield _case(Step(_adam(e3m4, e7m9, "auto", b2=0.95), 0.0, param_dtype="float32"), "Grid")
    yield _case(Lamb(_adam(e3m4, e7m9, "auto", eps=1e-6), 0.1, max_norm=0.0), "Grid")
    fine = scaled("int8", 4, 0, 0, "fine")
    yield _case(Step(ScaleByLion(mu_dtype=fine, mu_rounding="auto", seed=42), 0.1), "Fine")


def _adam(mu, nu, mu_rounding: str, **others) -> ScaleByAdam:
    return ScaleByAdam(mu_dtype=mu, nu_dtype=nu, mu_rounding=mu_rounding, seed=42, **others)


def _case(step: Step, flag: str) -> Case:
    """Return a case of five steps from zero state; the rate is mild, so that signs of updates show."""
    p = round_to(reals("relative weights", 48, (-4, 0)).reshape(_SHAPE), step.param_dtype)
    g = reals("relative gradients", _STEPS * 48, (-5, 1)).reshape(_STEPS, *_SHAPE)
    if flag == "Still":
        g[:, 0], g[1:, 1] = 0, 0
    if flag == "Burst":
        g[3, 2] *= 1000
    comment = f"{type(step).__name__}: {step.param_dtype} weights, {describe(step.rule)}: {NOTES[flag]}"
    return step_case(step, comment, p, g, None, 1e-3, (flag,), _clauses(step))


def _clauses(step: Step) -> tuple[str, ...]:
    """Return the clauses of the format of a step's first moment, and F3 where it says how it is rounded."""
    mu = step.rule.moments["mu"]
    assert isinstance(mu.dtype, Format)
    clauses = ("F12",) if mu.dtype.relative else ()
    clauses += ("F14", "F15") if mu.dtype.dtype == "int4" else ("F14",) if mu.dtype.scaled else ("F13",)
    return clauses + (("F3",) if mu.rounding == "auto" else ())
