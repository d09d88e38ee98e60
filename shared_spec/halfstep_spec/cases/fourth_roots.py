"""Second moments as their fourth roots, and first moments in units of a power of two beside them."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import Rule
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lamb import Lamb
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.relative import relative
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "a format of mu beside the fourth root",
    "Variant": "nesterov, no bias correction, eps and eps_root above the floor, other rates",
    "Wide": "gradients from far below the smallest second moment to far above the largest, which saturates",
    "Still": "coordinates that never got a gradient, or get none any more: the floor is never left",
    "Special": "gradients that are infinite, NaN, of either zero, or so large that their square overflows",
}

_STEPS, _SHAPE = 5, (8, 6)
_ROOT, _MU_LAW = "uroot4_e4m4", relative("mulaw8")
_MUS = (_MU_LAW, relative("float8_e3m4"))


def cases() -> list[Case]:
    """Return the cases of fourth_roots.json."""
    return [*_grid_cases(), *_variant_cases(), *_gradient_cases()]


def _grid_cases():
    for mu in _MUS:
        yield _case(Step(_adam(mu_dtype=mu), 0.1), "Grid")
    for storage in ("compensated", "split8", "master"):
        yield _case(Step(_adam(), 0.1, param_storage=storage), "Grid")
    for dtype in ("float32", "float16"):
        yield _case(Step(_adam(), 0.1, param_dtype=dtype), "Grid")
    for rounding in ("nearest", "auto"):
        yield _case(Step(_adam(mu_rounding=rounding, b1=0.5, b2=0.8, nu_rounding="nearest"), 0.1), "Grid")
    yield _case(Lamb(_adam(eps=1e-6), 0.1, max_norm=0.0), "Grid")


def _variant_cases():
    variants: list[dict] = [
        {"nesterov": True},
        {"eps": 1e-3},
        {"eps": 1e-6, "eps_root": 1e-5},
        {"b1": 0.5, "b2": 0.9},
        {"b1": 0.95, "b2": 0.999},
        {"nesterov": True, "mu_dtype": relative("float8_e3m4")},
    ]
    for variant in variants:
        yield _case(Step(_adam(**variant), 0.1), "Variant")
    yield _case(Lamb(_adam(bias_correction=False), 0.1, max_norm=0.0), "Variant")


def _gradient_cases():
    for flag in ("Wide", "Still", "Special"):
        for mu in _MUS:
            yield _case(Step(_adam(mu_dtype=mu), 0.1), flag)
    yield _case(Step(_adam(), 0.0, param_dtype="float32"), "Wide")


def _adam(**others) -> ScaleByAdam:
    options: dict = {"mu_dtype": _MU_LAW, "nu_dtype": _ROOT, "mu_rounding": "auto", "seed": 42}
    return ScaleByAdam(**(options | others))


def _case(step: Step, flag: str) -> Case:
    """Return a case of five steps from zero state."""
    p = round_to(reals("fourth root weights", 48, (-4, 0)).reshape(_SHAPE), step.param_dtype)
    comment = f"{type(step).__name__}: {step.param_dtype} weights, {describe(step.rule)}: {NOTES[flag]}"
    return step_case(step, comment, p, _gradients(flag), None, 1e-3, (flag,), _clauses(step.rule))


def _gradients(flag: str) -> np.ndarray:
    binades = (-40, 40) if flag == "Wide" else (-8, 1)
    g = reals(f"fourth root gradients {binades}", _STEPS * 48, binades).reshape(_STEPS, *_SHAPE)
    if flag == "Still":
        g[:, 0], g[:, 1], g[1:, 2] = 0.0, -0.0, 0.0
    if flag == "Special":
        special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38]
        g[1, 0], g[1, 1], g[2, 2] = special, 2e19, special
    return g


def _clauses(rule: Rule) -> tuple[str, ...]:
    """Return the clauses of the step and of the formats of its moments."""
    mu = rule.moments["mu"].dtype
    power_unit = isinstance(mu, Format) and mu.power_unit
    return "A12", "F17", *(("F18",) if power_unit else ("F12", "F13"))
