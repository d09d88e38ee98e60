"""Adan: five steps over formats of its three averages and its last gradient, and weight storages."""

from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.adan import ScaleByAdan
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import codebook, scaled
from halfstep_spec.vectors import Case

NOTES = {"Grid": "ways to store averages and weights"}

_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
_FORMATS = (
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    (scaled("float8_e4m3fn", **_SMALL), scaled("ufloat8_e5m3", **_SMALL), "bfloat16"),
    (codebook("dynamic8", **_SMALL), codebook("udynamic8", **_SMALL), scaled("int8", **_SMALL)),
)


def cases() -> list[Case]:
    """Return the cases of adan.json."""
    storages = ("nearest", "stochastic", "split16", "compensated")
    return [_case(*formats, storage) for formats, storage in zip(_FORMATS, storages, strict=True)]


def _case(signed, unsigned, grad, storage: str) -> Case:
    formats = {"mu_dtype": signed, "diff_dtype": signed, "nu_dtype": unsigned, "grad_dtype": grad}
    rule = ScaleByAdan(**formats, mu_rounding="stochastic", seed=42)
    step = Step(rule, 0.1, "decoupled", "float32" if storage == "nearest" else "bfloat16", storage)
    p = round_to(reals("adan weights", 24, (-4, 0)).reshape(4, 6), step.param_dtype)
    g = reals("adan gradients", 120, (-5, 1)).reshape(5, 4, 6)
    comment = f"{step.param_dtype} {storage} weights, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, None, 1e-3, ("Grid",), ("A11", "W6"))
