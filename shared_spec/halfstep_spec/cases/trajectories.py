"""Trajectories of any rule: its formats, ways to store weights, gradients out of range, and its variants."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case, storage_clauses
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import Rule
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.state_dtypes import as_format, scaled
from halfstep_spec.vectors import Case
from halfstep_spec.weights.weight_storage import PARAM_STORAGES

NOTES = {
    "Grid": "every param dtype by every way to store the moment",
    "Storage": "the other ways to store weights",
    "Variant": "other rates, a high seed, Nesterov's momentum, decay in another place",
    "Special": "gradients that are infinite, NaN, zero of either sign, or next to the largest float",
}

_STEPS, _SHAPE, _SIZE = 5, (4, 6), 24
_PLAIN = ("float32", "bfloat16", "float16")
_E4M3, _INT8 = scaled("float8_e4m3fn", 4, 0, 0), scaled("int8", 4, 0, 0)


def make_rule(kind: type[Rule], fmt: str | Format, rounding: str, **options) -> Rule:
    """Return a rule all of whose moments are stored in one way.

    Second moments are in bfloat16 if the format does not suit them.
    """
    arguments: dict = {"seed": 42}
    for declared in kind.declared().values():
        dtype = fmt if declared.signed or as_format(fmt).codes.for_second_moments else "bfloat16"
        arguments |= {declared.dtype: dtype, declared.rounding: rounding}
    return kind(**arguments | options)


def trajectories_of(
    kind: type[Rule], clause: str, variants: Mapping[str, Step], decay="decoupled"
) -> Iterator[Case]:
    """Return the cases that every rule has, and its variants."""
    for param, fmt, rounding in itertools.product(_PLAIN, (*_PLAIN, _E4M3, _INT8), ("nearest", "stochastic")):
        if (fmt, rounding) == ("float32", "stochastic"):
            continue  # float32 is not rounded: the same question twice
        step = Step(make_rule(kind, fmt, rounding), 0.1, decay, param)
        yield trajectory(step, "grid", ("Grid",), (clause, "A6"))
    for storage in PARAM_STORAGES.keys() - {"stochastic"}:
        step = Step(make_rule(kind, _E4M3, "stochastic"), 0.1, decay, "bfloat16", storage)
        yield trajectory(step, storage, ("Storage",), (clause, *storage_clauses(step)))
    for comment, step in variants.items():
        yield trajectory(step, comment, ("Variant",), (clause, "A6"))
    for fmt in ("float32", "bfloat16", _INT8):
        yield _special(Step(make_rule(kind, fmt, "nearest"), 0.0, decay, "bfloat16"), clause)


def _special(step: Step, clause: str) -> Case:
    inf, nan = float("inf"), float("nan")
    special = np.array([0, -0.0, inf, -inf, nan, 3e38, -3e38, 1, -1, 1e4, 1e-3, 2], np.float32)
    g = reals("special gradients", 2 * _SIZE, (-4, 0)).reshape(2, *_SHAPE)
    g[0].reshape(-1)[: special.size] = special
    comment = f"special gradients, then ordinary ones; {describe(step.rule)}"
    return step_case(step, comment, _weights("bfloat16"), g, None, 1e-3, ("Special",), (clause, "R6"))


def trajectory(step: Step, comment: str, flags, clauses) -> Case:
    """Return a case of some steps from zero state with fresh gradients."""
    g = reals("momentum gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, *_SHAPE)
    comment = f"{comment}: {step.param_dtype} weights, {describe(step.rule)}, {step.decay} decay"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, _weights(step.param_dtype), g, None, 1e-3, flags, clauses)


def _weights(dtype: str) -> np.ndarray:
    return round_to(reals("momentum weights", _SIZE, (-4, 0)).reshape(_SHAPE), dtype)
