"""Averages of weights, kept in the dtype of the weights."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.numbers.random_words import LAST_STEP, next_step, random_words, role_of
from halfstep_spec.numbers.rounding import round_to
from halfstep_spec.numbers.seeds import seed_words
from halfstep_spec.vectors import Array, Case
from halfstep_spec.weight_averages import ema_params

NOTES = {
    "Slow": "an average that rounding to nearest would leave where it is",
    "LateStep": "the words' step stops at 2^31 - 1",
}

_STEPS, _SIZE = 5, 20


def cases() -> list[Case]:
    """Return the cases of averages.json."""
    start = reals("averaged weights", _SIZE, (-4, 1))
    moved = start + np.arange(1, _STEPS + 1)[:, None] * reals("their movement", _SIZE, (-7, -4))
    rows = [
        ("bfloat16", 0, 0, 0.9, ()),
        ("bfloat16", (123 << 32) + 456, 0, 0.999, ("Slow",)),
        ("float16", 7, 1000, 0.9999, ("Slow",)),
        ("float32", 7, 0, 0.999, ()),
        ("bfloat16", 7, LAST_STEP - 2, 0.9, ("LateStep",)),
    ]
    moved = moved.astype(np.float32)
    return [_case(start, moved, *row) for row in rows]


def _case(start, moved, dtype: str, seed: int, count: int, decay: float, flags: tuple[str, ...]) -> Case:
    leaf, average, weights = "layers/0/kernel", round_to(start, dtype), round_to(moved, dtype)
    rows, rate, step = [], np.float32(decay), count
    for p in weights:
        step = next_step(step)
        words = random_words(seed, step, leaf, role_of("ema"), p.shape)
        average = ema_params(average, p, rate, dtype, words)
        rows.append(average)
    inputs = {
        "seed": Array.of(np.array(seed_words(seed), np.uint32)),
        "count": Array.of(np.int32(count)),
        "decay": Array.of(rate),
        "average": Array.of(round_to(start, dtype), dtype),
        "p": Array.of(weights, dtype),
    }
    outputs = {"average": Array.of(np.stack(rows), dtype, compare="bits")}
    clauses = ("G3", "W6", "W5") if "LateStep" in flags else ("G3", "W6")
    comment = f"an average in {dtype} at {decay}"
    return Case("ema_params", comment, {"leaf": leaf}, inputs, outputs, flags, clauses)
