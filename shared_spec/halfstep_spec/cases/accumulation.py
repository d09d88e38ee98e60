"""Gradients added up over micro-batches, in the dtypes of 16 and 32 bits."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.gradients.accumulation import accumulate
from halfstep_spec.numbers.random_words import Role, next_step, random_words
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.numbers.seeds import seed_words
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Equal": "equal gradients, of which plain addition in 16 bits loses the later ones",
    "Special": "infinities, NaN, zeros of both signs, sums past the largest number",
    "LateStep": "the words' step is far along, or stops at 2^31 - 1",
}

_MICRO_BATCHES, _SIZE = 6, 20


def cases() -> list[Case]:
    """Return the cases of accumulation.json."""
    made = reals("micro-batches", _MICRO_BATCHES * _SIZE, (-5, 1)).reshape(_MICRO_BATCHES, _SIZE)
    equal = np.tile(reals("one micro-batch", _SIZE, (-3, -1)), (12, 1))
    largest = np.float32(3.3895314e38)
    special = np.array([[np.inf, np.nan, 0.0, -0.0, largest, 1], [-np.inf, 1, 0.0, -0.0, largest, -1]])
    rows = [(dtype, 0, 0, made, ()) for dtype in ("bfloat16", "float16", "float32")]
    rows += [
        ("bfloat16", (123 << 32) + 456, 0, equal, ("Equal",)),
        ("bfloat16", 7, 0, special.astype(np.float32), ("Special",)),
        ("bfloat16", 7, 2**31 - 3, made[:4], ("LateStep",)),
        ("float16", 7, 99_999, equal[:4], ("Equal", "LateStep")),
    ]
    return [_case(*row) for row in rows]


def _case(dtype: str, seed: int, count: int, g: np.ndarray, flags: tuple[str, ...]) -> Case:
    leaf, given = "layers/0/kernel", round_to(g, dtype)
    total, rows = round_to(np.full(g.shape[1], -0.0, np.float32), dtype), []
    with np.errstate(invalid="ignore", over="ignore"):
        step = count
        for gradient in decode(given, dtype):
            step = next_step(step)
            words = random_words(seed, step, leaf, Role.ACCUMULATOR, gradient.shape)
            total = accumulate(total, gradient, dtype, words)
            rows.append(total)
    inputs = {
        "seed": Array.of(np.array(seed_words(seed), np.uint32)),
        "count": Array.of(np.int32(count)),
        "g": Array.of(given, dtype),
    }
    outputs = {"total": Array.of(np.stack(rows), dtype, compare="bits")}
    clauses = ("G1", "W6", "W5") if "LateStep" in flags else ("G1", "W6")
    comment = f"{len(rows)} gradients in {dtype}, the count before them {count}"
    return Case("accumulate", comment, {"leaf": leaf}, inputs, outputs, flags, clauses)
