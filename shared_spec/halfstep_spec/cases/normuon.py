"""NorMuon: steps with a given factor and rows of equal length."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.normuon import ScaleByNorMuon
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Given": "the factor is what it was to be the factor of: what a step does with a factor that is given",
    "Zero": "a row of the factor is zero, then all of it: it stays where it is",
}

_STEPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mu_dtype": "float32"}, "nearest"),
    ({"mu_dtype": "float32", "output_axis": 0, "scale": "consistent_rms"}, "stochastic"),
    ({"mu_dtype": scaled("float16", 4, 0, 0), "beta2": 0.5}, "stochastic"),
    ({"mu_dtype": "bfloat16", "scale": None, "bias_correction": True, "output_axis": 0}, "split16"),
)


def cases() -> list[Case]:
    """Return the cases of normuon.json."""
    return [*(_case(options, storage) for options, storage in _STEPS), _zeros()]


def _case(options: dict[str, Any], storage: str) -> Case:
    step = _step(options, storage)
    p = round_to(reals("normuon weights", 128, (-4, 0)).reshape(8, 16), step.param_dtype)
    g = reals("normuon gradients", 512, (-5, 1)).reshape(4, 8, 16)
    comment = f"{step.param_dtype} {storage} weights, {describe(step.rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, None, 1e-3, ("Given",), ("A13", "A14", "A22"))


def _zeros() -> Case:
    step = dataclasses.replace(_step({"mu_dtype": "float32", "beta": 0.0}, "nearest"), weight_decay=0.0)
    p = round_to(reals("normuon weights", 24, (-4, 0)).reshape(4, 6), step.param_dtype)
    g = reals("normuon gradients", 72, (-5, 1)).reshape(3, 4, 6)
    g[0, :, 2] = g[1] = 0
    return step_case(step, "zero rows", p, g, None, 1e-3, ("Given", "Zero"), ("A14", "A22"))


def _step(options: dict[str, Any], storage: str) -> Step:
    rule = ScaleByNorMuon(given=True, seed=42, **options)
    return Step(rule, 0.1, "decoupled", "float32" if storage == "nearest" else "bfloat16", storage)
