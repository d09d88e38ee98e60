"""SGD with fed-back rounding errors of weights: steps over formats, dtypes and rates."""

import dataclasses
import functools
from typing import Any

import numpy as np

from halfstep_spec.cases.adamw_fed_back import fed_back_case, rates_from
from halfstep_spec.cases.inputs import reals
from halfstep_spec.rules.sgd_fed_back import FedBackSGD, SGDFedBack
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "dtypes of the weights, and ways to store the sum",
    "Small": "small rates, where the bound by the sum itself decides",
    "Peak": "a rate far below the largest rate of the run, a quarter of which then divides what is fed back",
    "Rates": "a schedule, whose coming rates are known",
    "Brief": "hardly any momentum",
    "Still": "a learning rate of 0: nothing is divided by it",
    "L2": "L2 decay, which stands in front of the rule",
    "Edge": "weights of 0, subnormal weights, weights that overflow, and gradients of 0",
}

_RULE = functools.partial(SGDFedBack, accumulator_dtype="bfloat16", rounding="stochastic", seed=42)
_SHAPE = (4, 6)


def cases() -> list[Case]:
    """Return the cases of sgd_fed_back.json."""
    sizes: dict[str, Any] = {"min_size": 0, "min_ndim": 0}
    rows = [
        (_RULE(), "bfloat16", 0, 1e-2, ("Grid",)),
        (_RULE(), "float16", 0, 1e-2, ("Grid",)),
        (_RULE(), "float32", 0, 1e-2, ("Grid",)),
        (_RULE(accumulator_dtype="float32"), "bfloat16", 0, 1e-2, ("Grid",)),
        (_RULE(accumulator_dtype=scaled("float8_e4m3fn", 4, **sizes)), "bfloat16", 0, 1e-2, ("Grid",)),
        (_RULE(accumulator_dtype=scaled("int8", 4, **sizes)), "bfloat16", 0, 1e-2, ("Grid",)),
        (_RULE(nesterov=True), "bfloat16", 0, 1e-2, ("Grid",)),
        (_RULE(), "bfloat16", 1000, 1e-6, ("Small",)),
        (_RULE(), "float16", 1000, 1e-6, ("Small",)),
        (_RULE(peak_lr=1e-1), "bfloat16", 1000, 1e-3, ("Peak",)),
        (_RULE(peak_lr=1e-1), "bfloat16", 0, 0.0, ("Rates",)),
        (_RULE(peak_lr=1e-1, nesterov=True), "bfloat16", 15, 0.0, ("Rates",)),
        (_RULE(decay=2.0**-10), "bfloat16", 0, 1e-2, ("Brief",)),
        (_RULE(), "bfloat16", 3, 0.0, ("Still",)),
        (_RULE(), "bfloat16", 0, 1e-2, ("L2",)),
        (_RULE(), "bfloat16", 10, 1e-2, ("Edge",)),
        (_RULE(), "float16", 10, 1e-2, ("Edge",)),
    ]
    return [_case(*row) for row in rows]


def _case(rule: SGDFedBack, dtype: str, count: int, lr: float, flags: tuple[str, ...]) -> Case:
    size, edge = int(np.prod(_SHAPE)), flags == ("Edge",)
    weights = reals("weights of SGD fed back", size, (-6, 0))
    g = reals("gradients of SGD fed back", 5 * size, (-5, 1))
    if edge:
        weights[:8] = [0, -0.0, 1e-30, -1e-30, 2.0**-14, 6e4, -6.5504e4, 1e-5]
        g[4::7] = 0
    rule = dataclasses.replace(rule, learning_rate=lr)
    rates = rates_from(count, rule.peak_lr) if flags == ("Rates",) else ()
    step = FedBackSGD(rule, 0.1 if flags == ("L2",) else 0.0, "l2", dtype, "feedback", count, rates)
    return fed_back_case(step, weights.reshape(_SHAPE), g.reshape(5, *_SHAPE), count, lr, flags, "A23")
