"""Weights and moments in every storage: ten steps each, some with updates that nearest rounding loses."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import LEAF, describe, step_case, storage_clauses
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.codes import PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Case
from halfstep_spec.weights.weight_storage import PARAM_STORAGES

NOTES = {
    "Stall": "a learning rate at which every update is below half a unit in the last place of its weight",
    "Moving": "a learning rate at which weights move at every step",
    "Scaled": "moments as codes with a scale per block; the last block of a row is short",
    "Written": "weights that were clamped from outside between two steps, what is beside them left as it was",
    "Special": "infinite and NaN gradients, and weights that overflow",
}

_STEPS, _SHAPE = 10, (8, 6)
_MU = {
    "ufloat8_e5m3": "float16",
    "ufloat16_e7m9": "float8_e4m3fn",
    "uroot8": "float8_e4m3fn",
}
"""The format of mu beside a nu without a sign, if not float16; beside any other nu it is the format of nu."""


def cases() -> list[Case]:
    """Return the cases of weights.json."""
    return [*_weight_cases(), *_format_cases(), *_written_cases(), *_special_cases()]


def _weight_cases():
    for dtype in ("bfloat16", "float16", "float32"):
        for storage in PARAM_STORAGES:
            for flag, lr in (("Stall", 1e-5), ("Moving", 1e-2)):
                for decay in ("decoupled", "l2") if flag == "Moving" else ("decoupled",):
                    adam = ScaleByAdam(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=7)
                    step = Step(adam, 0.1, decay, dtype, storage)
                    yield trajectory(step, lr, (flag,), storage_clauses(step))


def _format_cases():
    scaled_nu = (name for name, codes in SCALED_CODES.items() if codes.for_second_moments)
    for nu in (*scaled_nu, *(name for name in PLAIN_CODES if name in _MU)):
        for rounding in ("nearest", "stochastic"):
            signed = (SCALED_CODES | PLAIN_CODES)[nu].signed
            mu = nu if signed else _MU.get(nu, "float16")
            adam = ScaleByAdam(mu_dtype=_small(mu), nu_dtype=_small(nu), mu_rounding=rounding, seed=7)
            clauses = ("F1", "F6") if nu in PLAIN_CODES else ("F4", "F5", "F6")
            yield trajectory(Step(adam, 0.1), 1e-3, ("Scaled",), clauses)
    adam = ScaleByAdam(mu_dtype=_small("float8_e4m3fn"), nu_dtype=_small("ufloat8_e5m3"), seed=7)
    for storage in PARAM_STORAGES:
        step = Step(adam, 0.1, param_storage=storage)
        yield trajectory(step, 1e-3, ("Scaled",), ("F4", *storage_clauses(step)))
    for block_size in ("row", None, 128):
        fmt = scaled("float8_e4m3fn", block_size, 0, 0)
        yield trajectory(Step(ScaleByAdam(mu_dtype=fmt, nu_dtype=fmt)), 1e-3, ("Scaled",), ("F4",))
    adam = ScaleByAdam(mu_dtype=scaled("int8"), nu_dtype=scaled("ufloat8_e5m3"))
    yield trajectory(Step(adam), 1e-3, ("Scaled",), ("F4",))


def _small(name: str) -> Format:
    return scaled(name, 4, 0, 0) if name in SCALED_CODES else Format(name)


def _written_cases():
    """Return steps on weights written by others, far from the bits that are kept beside them."""
    for storage in ("split8", "split16", "master"):
        step = Step(ScaleByAdam(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=7), 0.1, param_storage=storage)
        yield _written(step, "each third weight written", {0: 0.25}, 3)
    ends = {0: 0.0, 1: -0.0, 2: np.inf, 3: -np.inf, 4: 2.0**-14}
    for storage in ("split8", "split16", "master", "compensated"):
        for dtype in ("bfloat16", "float16"):
            adam = ScaleByAdam(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=7)
            step = Step(adam, param_dtype=dtype, param_storage=storage)
            yield _written(step, "zeros, infinities and small numbers written", ends, 6)


def _written(step: Step, what: str, numbers: dict[int, float], every: int) -> Case:
    """Return two steps after one, with numbers written between: each from its place on, to one in `every`."""
    p = round_to(reals("stored weights", 48, (-4, 0)).reshape(_SHAPE), step.param_dtype)
    g = reals("stored gradients", 3 * 48, (-5, 1)).reshape(3, *_SHAPE)
    first = decode(round_to(g[:1], step.param_dtype), step.param_dtype)[0]
    p, state = step.step(p, first, step.init(p), LEAF, 1e-2)
    p = p.copy()
    for place, number in numbers.items():
        p.reshape(-1)[place::every] = round_to(np.full(48 // every, number, np.float32), step.param_dtype)
    comment = f"{step.param_dtype} {step.param_storage}, {what}"
    of_storage = "P4" if step.param_storage == "compensated" else "P5"
    return step_case(step, comment, p, g[1:], state, 1e-2, ("Written",), (of_storage, "P7"))


def _special_cases():
    gradient = reals("special gradients", 48, (-4, 0)).reshape(_SHAPE)
    gradient[0, 0], gradient[1, 5], gradient[2, 1], gradient[3] = np.inf, np.nan, 2e19, 0
    for storage in PARAM_STORAGES:
        fmt = scaled("int8", 4, 0, 0)
        adam = ScaleByAdam(mu_dtype=fmt, nu_dtype=scaled("ufloat8_e5m3", 4, 0, 0))
        p = reals("special weights", 48, (-4, 0)).reshape(_SHAPE)
        p[4, 0], p[4, 1] = np.float32(3.38e38), np.float32(-3.38e38)
        step = Step(adam, 0.0, param_storage=storage)
        yield step_case(
            step,
            f"special, {storage}",
            round_to(p, "bfloat16"),
            gradient[None],
            None,
            1e-3,
            ("Special",),
            ("R6", "F7"),
        )


def trajectory(step: Step, lr: float, flags, clauses) -> Case:
    """Return a case of ten steps from zero state on weights of shape (8, 6)."""
    p = round_to(reals("stored weights", 48, (-4, 0)).reshape(_SHAPE), step.param_dtype)
    g = reals("stored gradients", _STEPS * 48, (-5, 1)).reshape(_STEPS, *_SHAPE)
    comment = f"{step.param_dtype} {step.param_storage}, {describe(step.rule)}"
    with np.errstate(under="raise"):  # contract A8
        return step_case(step, comment, p, g, None, lr, flags, clauses)
