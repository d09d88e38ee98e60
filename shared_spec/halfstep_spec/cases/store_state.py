"""State kept in a format from without: rules with plain moments, stored in every kind of format."""

from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.step import Step
from halfstep_spec.rules.store_state import StoreState
from halfstep_spec.rules.trace import Trace
from halfstep_spec.storage.state_dtypes import codebook, scaled
from halfstep_spec.vectors import Case

NOTES = {
    "All": "every array of the state is stored",
    "Selected": "some arrays are stored, the others left alone",
    "Small": "arrays that the format is not for are left alone",
    "Narrow": "the rule's own moments are of 16 bits: they are decoded to that",
    "Special": "infinite and NaN gradients, blocks of zeros and of one sign",
}

_STEPS, _SHAPE = 5, (4, 6)
_SIZE = 24


def cases() -> list[Case]:
    """Return the cases of store_state.json."""
    small: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
    e4m3, int8, dynamic8 = (
        scaled("float8_e4m3fn", **small),
        scaled("int8", **small),
        codebook("dynamic8", **small),
    )
    formats = ["bfloat16", "float16", "float32", e4m3, int8, dynamic8]
    formats.append(scaled("float16", **small))
    unsigned = ["ufloat16_e7m9", scaled("ufloat8_e5m3", **small), codebook("udynamic8", **small)]
    adam = ScaleByAdam(seed=42)
    rows = [(adam, fmt, "stochastic", None, "All") for fmt in formats]
    rows += [(adam, fmt, "stochastic", ("nu",), "Selected") for fmt in unsigned]
    rows += [
        (adam, "bfloat16", "nearest", None, "All"),
        (adam, e4m3, "nearest", None, "All"),
        (adam, e4m3, "stochastic", ("mu",), "Selected"),
        (adam, scaled("float8_e4m3fn", 4), "stochastic", None, "Small"),
        (ScaleByAdam(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=42), e4m3, "stochastic", None, "Narrow"),
        (ScaleByLion(seed=42), e4m3, "stochastic", None, "All"),
        (ScaleByLion(mu_dtype="bfloat16", seed=42), int8, "stochastic", None, "Narrow"),
        (Trace(0.9, True, seed=42), e4m3, "stochastic", None, "All"),
        (Trace(0.9, seed=(123 << 32) + 456), "bfloat16", "stochastic", None, "All"),
    ]
    result = [_trajectory(*row) for row in rows]
    result += [_special(adam, fmt) for fmt in ("bfloat16", e4m3, int8)]
    # Of a table's numbers, few are numbers of the rule's dtype.
    narrow = ScaleByLion(mu_dtype="bfloat16", seed=42), ScaleByAdam(mu_dtype="float16", seed=42)
    return result + [_trajectory(rule, dynamic8, "stochastic", None, "Narrow") for rule in narrow]


def _trajectory(rule, fmt, rounding, select, flag) -> Case:
    g = reals("stored state gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, *_SHAPE)
    with np.errstate(under="raise"):  # contract A8
        return _case(rule, fmt, rounding, select, flag, g)


def _special(rule, fmt) -> Case:
    g = reals("stored state, special", 2 * _SIZE, (-4, 0)).reshape(2, *_SHAPE)
    g[0, 0, 0], g[0, 1, 5], g[0, 2, 1] = np.inf, np.nan, 2e19
    # A block of zeros, and a short one without a negative number.
    g[:, 3] = np.array([0, 0, 0, 0, 1, 2.0**-14], np.float32)
    return _case(rule, fmt, "stochastic", None, "Special", g)


def _case(rule, fmt, rounding, select, flag, g) -> Case:
    stored = StoreState(rule, fmt, rounding, select, rule.seed)
    step = Step(stored, 0.1, param_dtype="bfloat16")
    p = round_to(reals("stored state weights", _SIZE, (-4, 0)).reshape(_SHAPE), "bfloat16")
    comment = f"{type(rule).__name__}, {describe(rule)}, stored as {describe(stored)}"
    return step_case(step, comment, p, g, None, 1e-3, (flag,), ("S1", "S2", "S3", "S4"))
