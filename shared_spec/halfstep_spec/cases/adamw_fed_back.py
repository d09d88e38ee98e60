"""AdamW with fed-back rounding errors of weights: steps over formats, dtypes and rates."""

import dataclasses
import functools
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.adamw_fed_back import AHEAD, AdamWFedBack, FedBack
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Grid": "dtypes of the weights, and ways to store the moments",
    "Small": "small rates, where the bound by the gap of a weight decides",
    "Peak": "a rate far below the largest rate of the run, a quarter of which then divides what is fed back",
    "Rising": "few steps, and a rate below the largest: coming rates are taken to rise on a line",
    "Rates": "a schedule, whose coming rates are known",
    "Brief": "hardly any momentum",
    "Still": "a learning rate of 0: nothing is divided by it",
    "L2": "L2 decay, which stands in front of the rule",
    "Edge": "weights of 0, subnormal weights, and weights that overflow",
}

_SIZES: dict[str, Any] = {"min_size": 0, "min_ndim": 0}
_RULE = functools.partial(AdamWFedBack, mu_rounding="stochastic", seed=42)
_SHAPE = (4, 6)
_UROOT8 = scaled("uroot8", 4, **_SIZES)
_ONE_BYTE: dict[str, Any] = {"mu_dtype": relative("float8_e3m4"), "nu_dtype": _UROOT8}


def cases() -> list[Case]:
    """Return the cases of adamw_fed_back.json."""
    both: dict[str, Any] = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
    halves: dict[str, Any] = {"mu_dtype": "bfloat16", "nu_dtype": "ufloat16_e7m9"}
    eights: dict[str, Any] = {"mu_dtype": relative("int8", 4, **_SIZES), "nu_dtype": _UROOT8}
    fours: dict[str, Any] = {"mu_dtype": relative("int4", 4, **_SIZES), "nu_dtype": _UROOT8}
    rows = [
        (_RULE(**both), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**both), "float16", 0, 1e-3, ("Grid",)),
        (_RULE(**both), "float32", 0, 1e-3, ("Grid",)),
        (_RULE(eps_root=2.0**-40), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**_ONE_BYTE), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**eights), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**halves), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**fours), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**both, nesterov=True), "bfloat16", 0, 1e-3, ("Grid",)),
        (_RULE(**both), "bfloat16", 1_000_000, 1e-6, ("Small",)),
        (_RULE(**both), "float16", 1_000_000, 1e-6, ("Small",)),
        (_RULE(**_ONE_BYTE), "bfloat16", 1_000_000, 1e-6, ("Small",)),
        (_RULE(**_ONE_BYTE), "bfloat16", 7, 1e-6, ("Small",)),
        (_RULE(**both, peak_lr=1e-3), "bfloat16", 1000, 1e-5, ("Peak",)),
        (_RULE(**both, peak_lr=1e-2), "bfloat16", 2, 1e-3, ("Rising",)),
        (_RULE(**both, peak_lr=1e-3), "bfloat16", 0, 0.0, ("Rates",)),
        (_RULE(**both, peak_lr=1e-3, nesterov=True, b1=0.99), "bfloat16", 15, 0.0, ("Rates",)),
        (_RULE(**both, b1=2.0**-10), "bfloat16", 0, 1e-3, ("Brief",)),
        (_RULE(**both), "bfloat16", 3, 0.0, ("Still",)),
        (_RULE(**both), "bfloat16", 0, 1e-3, ("L2",)),
        (_RULE(**both), "bfloat16", 10, 1e-3, ("Edge",)),
        (_RULE(**both), "float16", 10, 1e-3, ("Edge",)),
    ]
    return [_case(*row) for row in rows]


def _case(rule: AdamWFedBack, dtype: str, count: int, lr: float, flags: tuple[str, ...]) -> Case:
    size, edge = int(np.prod(_SHAPE)), flags == ("Edge",)
    weights, g = reals("weights fed back", size, (-6, 0)), reals("gradients fed back", 5 * size, (-5, 1))
    if edge:
        weights[:8] = [0, -0.0, 1e-30, -1e-30, 2.0**-14, 6e4, -6.5504e4, 1e-5]
    decay = "l2" if flags == ("L2",) else "decoupled"
    rule = dataclasses.replace(rule, learning_rate=lr, weight_decay=0.0 if edge else 0.1)
    rates = rates_from(count, rule.peak_lr) if flags == ("Rates",) else ()
    step = FedBack(rule, rule.weight_decay, decay, dtype, "feedback", count, rates)
    return fed_back_case(step, weights.reshape(_SHAPE), g.reshape(5, *_SHAPE), count, lr, flags, "A21")


def rates_from(count: int, peak: float) -> tuple[float, ...]:
    """Return rates of 5 steps after `count`, and of later steps: up in 20 steps, down in 400."""
    counts = range(count, count + 5 + AHEAD)
    return tuple(float(np.float32(peak * min((k + 1) / 20, (400 - k) / 380))) for k in counts)


def fed_back_case(
    step: FedBack,
    weights: np.ndarray,
    g: np.ndarray,
    count: int,
    lr: float,
    flags: tuple[str, ...],
    clause: str,
) -> Case:
    """Return steps of a rule that feeds errors back, from weights that are not rounded yet.

    Its input `rates` has the rates of these steps and of later ones, if a schedule gives them.
    """
    rule: Any = step.rule
    p = round_to(weights, step.param_dtype)
    state: Any = step.init(p)
    state = state._replace(rule=RuleState(count, state.rule.moments))
    after = f" after {count} steps" if count else ""
    comment = f"{step.param_dtype} weights{after}, learning rate {lr}, peak {rule.peak_lr}, {describe(rule)}"
    with np.errstate(under="raise"):  # contract A8
        case = step_case(step, comment, p, g, state, lr, flags, (clause, "P9", "W6"))
    rates = {"rates": Array.of(np.array(step.rates, np.float32))} if step.rates else {}
    return dataclasses.replace(case, inputs={**case.inputs, **rates})
