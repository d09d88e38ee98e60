"""Adam: ten steps over the grid of param dtype, moment dtypes, roundings and decay."""

import functools
import itertools

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import LEAF, describe, step_case
from halfstep_spec.numbers.random_words import LAST_STEP
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.storage.state_dtypes import as_format
from halfstep_spec.vectors import Case

NOTES = {
    "Default": "the roundings that users get: auto, so that mu is stochastic too wherever it is rounded",
    "Unchecked": "both to nearest all the same (nearest_unchecked)",
    "L2": "decay enters the gradient, before the moments",
    "Nearest": "weights rounded to nearest by nobody but P1",
    "Variant": "nesterov, eps_root, other rates, a high seed",
    "Resumed": "from the middle of a run: from all that a checkpoint holds, and nothing else",
    "LateStep": "the count stops at 2^31 - 1: the next step reads the words of the last one",
    "Cautious": "decay only where it does not pull against the step, by signs",
    "Special": "gradients that are infinite, NaN, zero or so large that their square overflows",
}

_STEPS, _SIZE = 10, 16
_DTYPES = ("float32", "bfloat16", "float16")


def cases() -> list[Case]:
    """Return the cases of adam.json."""
    return [*_grid_cases(), *_variant_cases(), *_resumed_cases(), *_special_cases(), *_cautious_cases()]


def _grid_cases():
    dtypes = _DTYPES
    roundings = {"Default": ("auto", "stochastic"), "Unchecked": ("nearest", "nearest")}
    grid = itertools.product(dtypes, dtypes, dtypes, roundings.items(), ("decoupled", "l2"))
    for param, mu, nu, (flag, (mu_rounding, nu_rounding)), decay in grid:
        if nu == "float16":
            continue  # refused: contract F1
        if flag == "Unchecked" and mu == nu == "float32":
            continue  # float32 moments are not rounded: the same question twice
        adam = ScaleByAdam(
            mu_dtype=mu, nu_dtype=nu, mu_rounding=mu_rounding, nu_rounding=nu_rounding, seed=42
        )
        flags = (flag, "L2") if decay == "l2" else (flag,)
        clauses = () if mu == nu == "float32" else ("F1", "F2")
        clauses += ("F3",) if mu_rounding == "auto" and mu != "float32" else ()
        yield _trajectory(Step(adam, 0.1, decay, param), "grid", flags, clauses)


def _variant_cases():
    low = functools.partial(ScaleByAdam, mu_dtype="bfloat16", nu_dtype="bfloat16")
    for param in _DTYPES:
        yield _trajectory(
            Step(low(), 0.1, param_dtype=param, param_storage="nearest"),
            "nearest weights",
            ("Nearest",),
        )
    rows = {
        "no decay": (low(), 0.0),
        "nesterov": (low(nesterov=True), 0.1),
        "nesterov, float32": (ScaleByAdam(nesterov=True), 0.1),
        "eps_root": (low(eps=1e-6, eps_root=1e-4), 0.1),
        "rates that need no correction": (low(b1=0.0, b2=0.5), 0.1),
        "slow rates, both stochastic": (
            low(b1=0.999, b2=0.9999, mu_rounding="stochastic"),
            0.1,
        ),
        "a seed of two words": (low(seed=(123 << 32) + 456), 0.1),
    }
    halves = functools.partial(low, nu_dtype="ufloat16_e7m9")
    rows |= {
        "nu without a sign": (halves(), 0.1),
        "nu without a sign, nearest": (halves(nu_rounding="nearest"), 0.1),
    }
    for comment, (adam, weight_decay) in rows.items():
        yield _trajectory(Step(adam, weight_decay), comment, ("Variant",))


def _resumed_cases():
    """Return cases that start from the state after three steps, with its count or with the last but one."""
    adam = ScaleByAdam(
        mu_dtype="bfloat16", nu_dtype="bfloat16", mu_rounding="stochastic", nesterov=True, seed=42
    )
    step = Step(adam, 0.1)
    p = round_to(reals("resumed weights", _SIZE, (-4, 0)), step.param_dtype)
    g = reals("resumed gradients", 6 * _SIZE, (-5, 1)).reshape(6, _SIZE)
    state = step.init(p)
    for gradient in decode(round_to(g[:3], step.param_dtype), step.param_dtype):
        p, state = step.step(p, gradient, state, LEAF, 1e-3)
    for flag, count, clauses in (("Resumed", 3, ("A7",)), ("LateStep", LAST_STEP - 1, ("A7", "W5"))):
        rule = state.rule._replace(count=count)
        comment = f"the steps after the first {count}: {describe(adam)}"
        yield step_case(step, comment, p, g[3:], state._replace(rule=rule), 1e-3, (flag,), clauses)


def _special_cases():
    inf, nan = float("inf"), float("nan")
    gradient = np.array(
        [0, -0.0, inf, -inf, nan, 3e38, -3e38, 2e19, 1, -1, 1e4, 0, 0, 1e-3, -1e-3, 2], np.float32
    )
    for dtype, nu in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "ufloat16_e7m9")):
        adam = ScaleByAdam(mu_dtype=dtype, nu_dtype=nu)
        step = Step(adam, 0.1, param_dtype=dtype)
        g = np.stack([gradient, *reals(f"special {dtype}", 2 * _SIZE, (-4, 0)).reshape(2, _SIZE)])
        p = round_to(reals("special weights", _SIZE, (-4, 0)), dtype)
        yield step_case(
            step,
            f"special gradients, then ordinary ones; {dtype}, {nu}",
            p,
            g,
            None,
            1e-3,
            ("Special",),
            ("R6",),
        )


def _cautious_cases():
    low = functools.partial(ScaleByAdam, mu_dtype="bfloat16", nu_dtype="bfloat16", seed=42)
    for param, storage in (("bfloat16", "stochastic"), ("float32", "nearest"), ("bfloat16", "split16")):
        step = Step(low(), 0.1, "cautious", param, storage)
        yield _trajectory(step, f"cautious, {storage}", ("Cautious",), ("D3",))
    yield _signs()


def _signs() -> Case:
    """Return a step at which only signs tell: products of an update and a weight are 0, or neither is."""
    tiny, sizes = 2.0**-100, np.array([0.0, 2.0**-100, 1.0, 2.0**20], np.float32)
    signed = np.concatenate([sizes, -sizes])
    u, p = (x.reshape(-1) for x in np.meshgrid(signed, signed))
    zeros = {name: as_format("float32").encode(x, None) for name, x in (("mu", 10 * u), ("nu", u * 0 + 1))}
    state = StepState(RuleState(LAST_STEP - 1, zeros), None)
    step = Step(ScaleByAdam(b2=0.5, eps=tiny), 0.5, "cautious", "float32", "nearest")
    clauses, g = ("A5", "A6", "D3"), np.zeros((1, u.size), np.float32)
    return step_case(
        step, "signs of updates and weights", p.view(np.uint32), g, state, 0.5, ("Cautious",), clauses
    )


def _trajectory(step: Step, comment: str, flags: tuple[str, ...], clauses=()) -> Case:
    """Return a case of ten steps from zero state with fresh gradients."""
    p = round_to(reals("trajectory weights", _SIZE, (-4, 0)), step.param_dtype)
    g = reals("trajectory gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, _SIZE)
    comment = f"{comment}: {step.param_dtype} weights, {describe(step.rule)}, {step.decay} decay"
    clauses = ("A5", "A6", *clauses, *(() if step.param_dtype == "float32" else ("A1",)))
    with np.errstate(under="raise"):  # contract A8: no float32 intermediate may be subnormal
        return step_case(step, comment, p, g, None, 1e-3, flags, clauses)
