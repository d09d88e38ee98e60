"""Lion: trajectories, and signs of sums next to zero."""

import functools

import numpy as np

from halfstep_spec.cases import trajectories
from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import step_case
from halfstep_spec.cases.trajectories import make_rule, trajectories_of
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.storage.state_dtypes import as_format
from halfstep_spec.vectors import Case

NOTES = trajectories.NOTES | {
    "Cautious": "decay only where it does not pull against the step, by signs",
    "Cancel": "two products whose sum is zero or next to nothing: contraction changes its sign",
}


def cases() -> list[Case]:
    """Return the cases of lion.json."""
    low = functools.partial(make_rule, ScaleByLion, "bfloat16")
    variants = {
        "no decay": Step(low("nearest"), 0.0),
        "L2 decay": Step(low("nearest"), 0.1, "l2"),
        "slow rates, stochastic": Step(low("stochastic", b1=0.95, b2=0.999), 0.1),
        "a seed of two words": Step(low("stochastic", seed=(123 << 32) + 456), 0.1),
    }
    return [*trajectories_of(ScaleByLion, "A9", variants), _cancelling(), _zeros(), *_cautious()]


def _cancelling() -> Case:
    rule = ScaleByLion(b1=0.9)
    m = reals("cancelling moments", 64, (-3, 2))
    b1 = np.float32(rule.b1)
    g = -(b1 * m) / (np.float32(1) - b1)
    p = round_to(reals("cancelling weights", 64, (-4, 0)), "float32")
    return _one_step(rule, "sums next to zero", p, g, m, ("Cancel",), ("A2", "A9", "M1"))


def _zeros() -> Case:
    """Return a step in which the sign of a zero shows: on weights of -0, +0 is all that keeps them."""
    m = np.array([-0.0, 0.0, -0.0, 0.0] * 2, np.float32)
    g = np.array([-0.0, -0.0, 0.0, 0.0] * 2, np.float32)
    p = np.array([-0.0] * 4 + [0.0] * 4, np.float32).view(np.uint32)
    return _one_step(ScaleByLion(), "zeros of either sign", p, g, m, ("Special",), ("A9",))


def _cautious():
    """Yield steps without decay where a sign pulls the weight away from 0."""
    for storage in ("stochastic", "split8"):
        step = Step(make_rule(ScaleByLion, "bfloat16", "stochastic"), 0.1, "cautious", "bfloat16", storage)
        yield trajectories.trajectory(step, f"cautious, {storage}", ("Cautious",), ("A9", "A6", "D3"))


def _one_step(rule: ScaleByLion, comment: str, p, g, m, flags, clauses) -> Case:
    state = StepState(RuleState(6, {"mu": as_format("float32").encode(m, None)}), None)
    step = Step(rule, param_dtype="float32", param_storage="nearest")
    return step_case(step, comment, p, g[None], state, 1e-3, flags, clauses)
