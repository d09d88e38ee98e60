"""The second moment alone: three steps over its switches, formats and weight storages."""

from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.rms import ScaleByRms
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {"Grid": "ways to store the second moment and weights"}

_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}


def cases() -> list[Case]:
    """Return the cases of rms.json."""
    of_adam: dict[str, Any] = {"decay": 0.999, "eps_in_sqrt": False, "bias_correction": True}
    return [
        _case(ScaleByRms(), "nearest"),
        _case(ScaleByRms(**of_adam, nu_dtype="bfloat16", seed=42), "stochastic"),
        _case(ScaleByRms(**of_adam, nu_dtype=scaled("ufloat8_e5m3", **_SMALL), seed=42), "split16"),
    ]


def _case(rule: ScaleByRms, storage: str) -> Case:
    step = Step(rule, 0.1, "decoupled", "float32" if storage == "nearest" else "bfloat16", storage)
    p = round_to(reals("rms weights", 24, (-4, 0)).reshape(4, 6), step.param_dtype)
    g = reals("rms gradients", 72, (-5, 1)).reshape(3, 4, 6)
    comment = f"{step.param_dtype} {storage} weights, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, None, 1e-3, ("Grid",), ("A16",))
