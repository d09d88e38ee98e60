"""Adafactor: steps on arrays that are factored and others, and powers of the count."""

from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.means import inverse_power, mean
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.adafactor import Adafactor, ScaleByFactoredRms
from halfstep_spec.rules.step import StepState
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Grid": "shapes, ways to store weights and what is not factored",
    "Order": "sums of an odd number, of one, of a power of two: the order is in the contract",
}

_ROWS: tuple[tuple[tuple[int, ...], dict[str, Any], str], ...] = (
    ((5, 13), {}, "nearest"),
    ((13, 5), {"floor": 2.0**-10, "epsilon": 0.0}, "stochastic"),
    ((3, 2, 7, 6), {"decay_rate": 0.5, "step_offset": 2}, "split16"),
    ((8, 3), {"nu_dtype": scaled("ufloat8_e5m3", 3, 0, 0), "min_dim_size_to_factor": 4}, "stochastic"),
    ((24,), {"nu_dtype": "bfloat16"}, "compensated"),
    ((4, 4), {"factored": False, "nu_dtype": "ufloat16_e7m9"}, "nearest"),
)


def cases() -> list[Case]:
    """Return the cases of adafactor.json."""
    return [*(_step_case(*row) for row in _ROWS), *map(_mean_case, (1, 13, 64)), _power_case()]


def _step_case(shape: tuple[int, ...], options: dict[str, Any], storage: str) -> Case:
    rule = ScaleByFactoredRms(seed=42, **{"min_dim_size_to_factor": 2, **options})
    # A threshold of 1/2 shortens some updates and not others.
    step = Adafactor(rule, 0.1, "decoupled", "bfloat16", storage, 0.5)
    size = int(np.prod(shape))
    p = round_to(reals("adafactor weights", size, (-4, 0)).reshape(shape), step.param_dtype)
    g = reals("adafactor gradients", 3 * size, (-5, 1)).reshape(3, *shape)
    first = step.init(p)
    state = StepState(RuleState(6, first.rule.moments), first.extra) if rule.step_offset else first
    comment = f"{list(shape)}, {step.param_dtype} {storage} weights, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, state, 1e-2, ("Grid",), ("A18", "A19", "M3", "M4"))


def _mean_case(size: int) -> Case:
    x = reals(f"mean of {size}", 2 * size, (-5, 5)).reshape(2, size)
    outputs = {"rows": mean(x, 1), "columns": mean(x, 0), "all": mean(x)}
    return Case(
        "mean",
        f"of {size} numbers, of two, of {2 * size}",
        {},
        {"x": Array.of(x)},
        {name: Array.of(y, compare="bits") for name, y in outputs.items()},
        ("Order",),
        ("M3",),
    )


def _power_case() -> Case:
    counts = np.array([1, 2, 3, 10, 1000, 123457, 2**24 + 3, 2**31 - 1], np.int32)
    powers = np.array([0.0, 0.5, 0.8, 0.95, 1.0], np.float32)
    table = np.array([[inverse_power(t, c) for c in powers] for t in counts], np.float32)
    inputs = {"count": Array.of(counts), "power": Array.of(powers)}
    return Case(
        "inverse_power",
        "t^-c of counts and powers",
        {},
        inputs,
        {"y": Array.of(table, compare="bits")},
        (),
        ("M4",),
    )
