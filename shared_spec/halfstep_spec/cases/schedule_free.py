"""Schedule-free averaging: five steps over formats of the lead, weight storages and counts.

The link is asked alone, in front of the learning rate, which then scales the lead too.
"""

import functools
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.schedule_free import ScaleByScheduleFree
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "ways to store the lead and weights",
    "Warmup": "steps of the warm-up, and the first ones after it",
    "Late": "a long run: the average moves by a share of one over the count",
}

_STEPS = 5
_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
_E4M3, _INT8 = (scaled(x, **_SMALL) for x in ("float8_e4m3fn", "int8"))
_FREE = functools.partial(ScaleByScheduleFree, seed=42)


def cases() -> list[Case]:
    """Return the cases of schedule_free.json."""
    rows = [
        (_FREE(), "nearest", 0, ()),
        (_FREE(lead_dtype="bfloat16"), "stochastic", 0, ()),
        (_FREE(lead_dtype=_INT8), "split16", 0, ()),
        (_FREE(lead_dtype=_E4M3), "compensated", 0, ()),
        (_FREE(0.75, 3.0), "nearest", 0, ("Warmup",)),
        (_FREE(0.0, 2.0, "bfloat16"), "stochastic", 0, ("Warmup",)),
        (_FREE(0.98, 1000.0, "bfloat16"), "stochastic", 998, ("Warmup",)),
        (_FREE(0.9, 1000.0), "nearest", 1_000_000, ("Late",)),
    ]
    return [_case(*row) for row in rows]


def _case(rule: ScaleByScheduleFree, storage: str, count: int, flags: tuple[str, ...]) -> Case:
    step = Step(rule, 0.0, "decoupled", "float32" if storage == "nearest" else "bfloat16", storage)
    p = round_to(reals("schedule-free weights", 24, (-4, 0)).reshape(4, 6), step.param_dtype)
    g = reals("schedule-free gradients", 24 * _STEPS, (-5, 1)).reshape(_STEPS, 4, 6)
    state: Any = step.init(p)
    state = state._replace(rule=RuleState(count, state.rule.moments))
    after = f" after {count} steps" if count else ""
    comment = f"{step.param_dtype} {storage} weights{after}, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, state, 1e-3, flags or ("Grid",), ("A17", "W6"))
