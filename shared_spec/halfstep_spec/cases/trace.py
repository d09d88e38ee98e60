"""Momentum: trajectories."""

import functools

from halfstep_spec.cases import trajectories
from halfstep_spec.cases.trajectories import make_rule, trajectories_of
from halfstep_spec.rules.step import Step
from halfstep_spec.rules.trace import Trace
from halfstep_spec.vectors import Case

NOTES = trajectories.NOTES


def cases() -> list[Case]:
    """Return the cases of trace.json."""
    low = functools.partial(make_rule, Trace, "bfloat16")
    variants = {
        "no decay": Step(low("nearest"), 0.0, "l2"),
        "nesterov": Step(low("nearest", nesterov=True), 0.1, "l2"),
        "nesterov, float32": Step(
            make_rule(Trace, "float32", "nearest", nesterov=True), 0.1, "l2", "float32"
        ),
        "slow, stochastic": Step(low("stochastic", decay=0.999), 0.1, "l2"),
        "a seed of two words": Step(low("stochastic", seed=(123 << 32) + 456), 0.1, "l2"),
    }
    return list(trajectories_of(Trace, "A10", variants, "l2"))
