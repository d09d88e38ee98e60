"""AdamW to weights in codes: steps over formats of the moments, small arrays, rates of 0."""

import dataclasses
import functools
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.adamw_in_codes import AdamWInCodes, InCodes
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case

NOTES = {
    "Grid": "ways to store the moments beside weights in codes",
    "Small": "an array too small for codes: its weights are float32, and nothing is fed back",
    "Rising": "few steps, and a rate below the largest of the run: coming rates are taken to rise on a line",
    "Brief": "hardly any momentum",
    "Still": "a learning rate of 0: nothing is divided by it",
    "Late": "a long run",
    "Slow": "a rate so small that errors divided by it reach the clamp of mu",
    "Empty": "blocks without a gradient: what is fed back is past the largest scale of mu, where it stops",
}

_SIZES: dict[str, Any] = {"min_size": 0, "min_ndim": 0}
_ROWS = scaled("int8", "row", scale="fine", **_SIZES)
_RULE = functools.partial(AdamWInCodes, param_dtype=_ROWS, mu_rounding="stochastic", seed=42)
_RELATIVE, _RELATIVE4 = relative("int8", 4, **_SIZES), relative("int4", 4, **_SIZES)
_UROOT8 = scaled("uroot8", 4, **_SIZES)


def cases() -> list[Case]:
    """Return the cases of adamw_in_codes.json."""
    rows = [
        (_RULE(), (4, 6), 0, 1e-3, ("Grid",)),
        (_RULE(mu_dtype="bfloat16", nu_dtype="bfloat16"), (2, 3, 4), 0, 1e-2, ("Grid",)),
        (_RULE(mu_dtype=_RELATIVE, nu_dtype=_UROOT8, eps_root=2.0**-40), (4, 6), 0, 1e-4, ("Grid",)),
        (_RULE(param_dtype=scaled("int8", "row", scale="fine")), (4, 6), 0, 1e-3, ("Small",)),
        (_RULE(b1=2.0**-10), (4, 6), 0, 1e-3, ("Brief",)),
        (_RULE(), (4, 6), 3, 0.0, ("Still",)),
        (_RULE(peak_lr=1e-2), (4, 6), 2, 1e-3, ("Rising",)),
        (_RULE(b2=0.95, mu_dtype="bfloat16"), (4, 6), 1_000_000, 1e-6, ("Late",)),
        (_RULE(mu_dtype=scaled("int8", 4, scale="fine", **_SIZES)), (4, 6), 0, 1e-12, ("Slow",)),
        (_RULE(mu_dtype=_RELATIVE, nu_dtype=_UROOT8), (4, 6), 0, 1e-3, ("Empty",)),
        (_RULE(mu_dtype=_RELATIVE4, nu_dtype=_UROOT8), (4, 6), 0, 1e-3, ("Empty",)),
    ]
    return [_case(*row) for row in rows]


def _case(rule: AdamWInCodes, shape, count: int, lr: float, flags: tuple[str, ...]) -> Case:
    rule = dataclasses.replace(rule, learning_rate=lr, weight_decay=0.1)
    step = InCodes(rule, rule.weight_decay, "decoupled", "float32", "nearest")
    size = int(np.prod(shape))
    p = round_to(reals("weights in codes", size, (-6, 0)).reshape(shape), "float32")
    g = reals("gradients of codes", 5 * size, (-5, 1)).reshape(5, *shape)
    if flags == ("Empty",):
        g[:, ::2] = 0
    state: Any = step.init(p)
    state = state._replace(rule=RuleState(count, state.rule.moments))
    after = f" after {count} steps" if count else ""
    comment = f"float32 weights{after}, learning rate {lr}, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, state, lr, flags, ("A20", "P8", "W6"))
