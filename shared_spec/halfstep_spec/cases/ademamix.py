"""AdEMAMix: four steps over formats of its three averages, and weight storages."""

from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.ademamix import ScaleByAdemamix
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {"Grid": "ways to store averages and weights"}

_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
_FORMATS = (
    ("float32", "float32", "float32", "nearest"),
    ("bfloat16", "bfloat16", "bfloat16", "stochastic"),
    (
        scaled("float8_e4m3fn", **_SMALL),
        scaled("int8", **_SMALL),
        scaled("ufloat8_e5m3", **_SMALL),
        "split16",
    ),
)


def cases() -> list[Case]:
    """Return the cases of ademamix.json."""
    return [_case(*row) for row in _FORMATS]


def _case(fast, slow, unsigned, storage: str) -> Case:
    rule = ScaleByAdemamix(
        mu_dtype=fast, slow_dtype=slow, nu_dtype=unsigned, mu_rounding="stochastic", seed=42
    )
    step = Step(rule, 0.1, "decoupled", "float32" if storage == "nearest" else "bfloat16", storage)
    p = round_to(reals("ademamix weights", 24, (-4, 0)).reshape(4, 6), step.param_dtype)
    g = reals("ademamix gradients", 96, (-5, 1)).reshape(4, 4, 6)
    comment = f"{step.param_dtype} {storage} weights, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, None, 1e-3, ("Grid",), ("A15", "W6"))
