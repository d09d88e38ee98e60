"""Rules of one moment, Lion and momentum: steps over param dtypes, formats, roundings and weight storages."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import Rule, RuleState
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.rules.trace import Trace
from halfstep_spec.storage.formats import Format, as_format, scaled
from halfstep_spec.vectors import Case
from halfstep_spec.weights.param_storage import PARAM_STORAGES

NOTES = {
    "Grid": "every param dtype by every way to store the moment",
    "Storage": "the other ways to store weights",
    "Variant": "other rates, a high seed, Nesterov's momentum, decay in another place",
    "Cancel": "two products whose sum is zero or next to nothing: contraction changes its sign",
    "Special": "gradients that are infinite, NaN, zero of either sign, or next to the largest float",
}

_STEPS, _SHAPE = 5, (4, 6)
_SIZE = 24

Make = Callable[[str | Format, str], Rule]


def lion_cases() -> list[Case]:
    """Return the cases of lion.json."""

    def make(fmt, rounding, **options):
        return ScaleByLion(mu_dtype=fmt, mu_rounding=rounding, **{"seed": 42, **options})

    low = functools.partial(make, "bfloat16", "nearest")
    variants = {
        "no decay": Step(low(), 0.0),
        "L2 decay": Step(low(), 0.1, "l2"),
        "slow rates, stochastic": Step(make("bfloat16", "stochastic", b1=0.95, b2=0.999), 0.1),
        "a seed of two words": Step(make("bfloat16", "stochastic", seed=(123 << 32) + 456), 0.1),
    }
    return [*_cases(make, "decoupled", "A9", variants), _cancelling_lion(), _zeros_lion()]


def trace_cases() -> list[Case]:
    """Return the cases of trace.json."""

    def make(fmt, rounding, **options):
        return Trace(accumulator_dtype=fmt, rounding=rounding, **{"seed": 42, **options})

    low = functools.partial(make, "bfloat16", "nearest")
    variants = {
        "no decay": Step(low(), 0.0, "l2"),
        "nesterov": Step(low(nesterov=True), 0.1, "l2"),
        "nesterov, float32": Step(make("float32", "nearest", nesterov=True), 0.1, "l2", "float32"),
        "slow, stochastic": Step(make("bfloat16", "stochastic", decay=0.999), 0.1, "l2"),
        "a seed of two words": Step(make("bfloat16", "stochastic", seed=(123 << 32) + 456), 0.1, "l2"),
    }
    return list(_cases(make, "l2", "A10", variants))


def _cases(make: Make, decay: str, clause: str, variants: dict[str, Step]):
    small: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
    formats = ("float32", "bfloat16", "float16", scaled("float8_e4m3fn", **small), scaled("int8", **small))
    for param, fmt, rounding in itertools.product(formats[:3], formats, ("nearest", "stochastic")):
        if (fmt, rounding) == ("float32", "stochastic"):
            continue  # float32 is not rounded: the same question twice
        assert isinstance(param, str)
        step = Step(make(fmt, rounding), 0.1, decay, param)
        yield _trajectory(step, "grid", ("Grid",), (clause, "A6"))
    for storage in PARAM_STORAGES.keys() - {"stochastic"}:
        step = Step(make(formats[3], "stochastic"), 0.1, decay, "bfloat16", storage)
        yield _trajectory(step, storage, ("Storage",), (clause, "P1", "P4"))
    for comment, step in variants.items():
        yield _trajectory(step, comment, ("Variant",), (clause, "A6"))
    inf, nan = float("inf"), float("nan")
    special = np.array([0, -0.0, inf, -inf, nan, 3e38, -3e38, 1, -1, 1e4, 1e-3, 2], np.float32)
    for fmt in ("float32", "bfloat16", formats[4]):
        step = Step(make(fmt, "nearest"), 0.0, decay, "bfloat16")
        g = reals("special gradients", 2 * _SIZE, (-4, 0)).reshape(2, *_SHAPE)
        g[0].reshape(-1)[: special.size] = special
        comment = f"special gradients, then ordinary ones; {describe(step.rule)}"
        yield step_case(step, comment, _weights("bfloat16"), g, None, 1e-3, ("Special",), (clause, "R6"))


def _cancelling_lion() -> Case:
    rule = ScaleByLion(b1=0.9)
    m = reals("cancelling moments", 64, (-3, 2))
    b1 = np.float32(rule.b1)
    g = -(b1 * m) / (np.float32(1) - b1)
    state = StepState(RuleState(6, {"mu": as_format("float32").encode(m, None)}), None)
    step = Step(rule, param_dtype="float32", param_storage="nearest")
    p = round_to(reals("cancelling weights", 64, (-4, 0)), "float32")
    clauses = ("A2", "A9", "M1")
    return step_case(step, "sums next to zero", p, g[None], state, 1e-3, ("Cancel",), clauses)


def _zeros_lion() -> Case:
    """Return a step in which the sign of a zero shows: on weights of -0, +0 is all that keeps them."""
    m = np.array([-0.0, 0.0, -0.0, 0.0] * 2, np.float32)
    g = np.array([-0.0, -0.0, 0.0, 0.0] * 2, np.float32)
    state = StepState(RuleState(6, {"mu": as_format("float32").encode(m, None)}), None)
    step = Step(ScaleByLion(), param_dtype="float32", param_storage="nearest")
    p = np.array([-0.0] * 4 + [0.0] * 4, np.float32).view(np.uint32)
    return step_case(step, "zeros of either sign", p, g[None], state, 1e-3, ("Special",), ("A9",))


def _trajectory(step: Step, comment: str, flags, clauses) -> Case:
    g = reals("momentum gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, *_SHAPE)
    comment = f"{comment}: {step.param_dtype} weights, {describe(step.rule)}, {step.decay} decay"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, _weights(step.param_dtype), g, None, 1e-3, flags, clauses)


def _weights(dtype: str) -> np.ndarray:
    return round_to(reals("momentum weights", _SIZE, (-4, 0)).reshape(_SHAPE), dtype)
