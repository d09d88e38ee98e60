"""Muon: the factor of matrices, and steps with a factor that is given."""

from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.newton_schulz import newton_schulz
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.rules.muon import ScaleByMuon
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Grid": "ways to store the momentum and the weights",
    "Given": "the factor is what it was to be the factor of: what a step does with a factor that is given",
    "Order": "the factor depends on the order of sums: the norm of the difference is bounded",
    "Zero": "a zero matrix among others: its factor is exactly 0",
}

_SLOPE, _ROUNDINGS = 3.4445**5, 10
_FINE = scaled("int8", 8, 0, 0, scale="fine")
_STEPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mu_dtype": "float32"}, "nearest"),
    ({"mu_dtype": "float32", "output_axis": 0, "scale": "consistent_rms"}, "stochastic"),
    ({"mu_dtype": "bfloat16", "mu_rounding": "stochastic", "nesterov": False}, "stochastic"),
    ({"mu_dtype": scaled("float16", 4, 0, 0)}, "stochastic"),
    ({"mu_dtype": scaled("float16", 4, 0, 0), "bias_correction": True, "output_axis": 0}, "split16"),
    ({"mu_dtype": _FINE, "scale": None}, "compensated"),
)


def cases() -> list[Case]:
    """Return the cases of muon.json."""
    steps = [_step_case(options, storage) for options, storage in _STEPS]
    return [*_factor_cases(), *steps, _step_case({"mu_dtype": "bfloat16"}, "stochastic", "cautious")]


def _factor_cases():
    rows = {
        "inputs by outputs, wide": ((12, 20), (0,), (1,)),
        "inputs by outputs, tall": ((20, 12), (0,), (1,)),
        "outputs by inputs": ((12, 20), (1,), (0,)),
        "a stack of layers": ((3, 8, 16), (1,), (2,)),
        "a kernel of a convolution, outputs last": ((3, 3, 4, 16), (0, 1, 2), (3,)),
        "a kernel of a convolution, outputs first": ((16, 4, 3, 3), (1, 2, 3), (0,)),
        "one column": ((9, 1), (0,), (1,)),
    }
    for comment, (shape, inputs, outputs) in rows.items():
        x = reals(comment, int(np.prod(shape)), (-6, 0)).reshape(shape)
        yield _factor_case(comment, x, inputs, outputs)
    large = reals("large", 64, (100, 125)).reshape(8, 8)
    yield _factor_case("squares that overflow in float32", large, (0,), (1,))
    yield _factor_case("a zero matrix", np.zeros((4, 6), np.float32), (0,), (1,))


def _factor_case(comment: str, x: np.ndarray, inputs, outputs) -> Case:
    factor = newton_schulz(x, inputs, outputs)
    rank = min(np.prod([x.shape[axis] for axis in axes]) for axes in (inputs, outputs))
    compare: Any = "bits"
    if factor.any():
        bound = _SLOPE * _ROUNDINGS * 2.0**-24 * float(np.sqrt(rank))
        because = (
            "five steps magnify an error of one direction by up to 3.4445^5, and their sums leave some 10 "
            f"roundings of 2^-24 in each of sqrt({rank}) directions (contract A14)"
        )
        compare = {"norm": bound, "because": because}
    arguments = {"reduction_axis": list(inputs), "output_axis": list(outputs)}
    flags = ("Order",) if factor.any() else ("Zero",)
    outputs_of = {"factor": Array.of(factor, compare=compare)}
    return Case("newton_schulz", comment, arguments, {"x": Array.of(x)}, outputs_of, flags, ("A14",))


def _step_case(options: dict[str, Any], storage: str, decay: str = "decoupled") -> Case:
    rule = ScaleByMuon(given=True, seed=42, **options)
    step = Step(rule, 0.1, decay, "float32" if storage == "nearest" else "bfloat16", storage)
    p = round_to(reals("muon weights", 128, (-4, 0)).reshape(8, 16), step.param_dtype)
    g = reals("muon gradients", 512, (-5, 1)).reshape(4, 8, 16)
    comment = f"{step.param_dtype} {storage} weights, {describe(rule)}"
    cautious = decay == "cautious"
    comment = f"{comment}, cautious decay" if cautious else comment
    clauses = ("A13", "A14", "D3") if cautious else ("A13", "A14")
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, None, 1e-3, ("Grid", "Given"), clauses)
