"""The update of `round_stochastically`, and the weight after it is applied."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.numbers.random_words import Role, random_words
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.numbers.seeds import seed_words
from halfstep_spec.vectors import Array, Case
from halfstep_spec.weights.weight_rule import apply_updates
from halfstep_spec.weights.weight_storage import param_storage

NOTES = {
    "Small": "updates far below half a unit in the last place, which nearest rounding would lose",
    "Corner": "classes in which q - p cannot carry p to q, so that nearest(p + u) decides",
    "Special": "infinities, NaN and zeros of both signs",
    "PassThrough": "float32 weights are not rounded",
}

_INF, _NAN = float("inf"), float("nan")


def cases() -> list[Case]:
    """Return the cases of params.json."""
    result = []
    for dtype in ("bfloat16", "float16"):
        p = reals(f"{dtype} weights", 48, (-8, 0))
        for name, shift in (("tiny", 14), ("small", 10), ("half a unit", 8), ("large", 2)):
            u = reals(f"{dtype} {name} updates", 48, (-8 - shift, -shift))
            flags = ("Small",) if shift > 8 else ()
            result.append(_case(dtype, f"{name} updates", p, u, flags))
        result += [_case(dtype, comment, p, u, (flag,)) for comment, flag, p, u in _special_rows(dtype)]
    u = reals("float32 updates", 8, (-20, -10))
    result.append(
        _case("float32", "u passes through", reals("float32 weights", 8, (-8, 0)), u, ("PassThrough",))
    )
    return result


def _special_rows(dtype: str):
    largest = 3.3895314e38 if dtype == "bfloat16" else 65504.0
    yield (
        "an update of zero leaves every weight alone",
        "Special",
        [0.0, -0.0, 1.0, -1.0, _INF, -_INF],
        [0.0] * 6,
    )
    yield "infinite and NaN updates", "Special", [1.0, 1.0, 1.0, _INF, -0.0], [_INF, -_INF, _NAN, -_INF, -0.0]
    yield "NaN and infinite weights", "Special", [_NAN, _INF, -_INF], [1.0, 1.0, 1.0]
    yield "past the largest finite value", "Special", [largest, -largest], [largest, -largest]
    yield (
        "a weight that lands 2^17 below itself and more",
        "Corner",
        [1.0, 1.0, -1.0],
        [-1 + 2.0**-20, -1 + 2.0**-22, 1.0],
    )
    yield "a weight that lands on zero", "Corner", [1.0, -1.0, 0.5], [-1.0, 1.0, -0.5]


def _case(dtype: str, comment: str, p, u, flags) -> Case:
    p, u = round_to(np.array(p, np.float32), dtype), np.array(u, np.float32)
    seed, step, leaf = 11, 5, "layers/0/kernel"
    words = random_words(seed, step, leaf, Role.PARAM, p.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        emitted, _ = param_storage("stochastic", dtype).emit(p, u, None, words)
        applied = apply_updates(p, emitted, dtype)
    inputs = {
        "seed": Array.of(np.array(seed_words(seed), np.uint32)),
        "step": Array.of(np.int32(step)),
        "p": Array.of(p, dtype),
        "u": Array.of(u),
    }
    outputs = {"u": Array.of(emitted, compare="bits"), "p": Array.of(applied, dtype, "bits")}
    return Case(
        "round_stochastically",
        f"{comment}; {dtype}",
        {"leaf": leaf},
        inputs,
        outputs,
        tuple(flags),
        ("P1", "P2", "P6") if dtype == "float32" else ("P1", "P2", "P3"),
    )
