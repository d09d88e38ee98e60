"""Norms of many arrays, added in integers, and updates clipped by a norm that is given."""

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.numbers.global_norm import global_norm
from halfstep_spec.rules.clip import clip
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Order": "elements whose float32 squares add up to another number in another order",
    "Carry": "sums that pass 32 bits",
    "Range": "elements whose squares underflow or overflow in float32",
    "Special": "zeros, infinities, NaN, subnormal numbers, no element at all",
}


def cases() -> list[Case]:
    """Return the cases of clip.json."""
    inf, nan = np.inf, np.nan
    norms = {
        "one element": ([reals("one element", 1, (-3, 2))], ("Order",)),
        "three arrays of forty binades": (
            np.split(reals("forty binades", 300, (-30, 9)), [7, 200]),
            ("Order",),
        ),
        "equal numbers next to 2": ([np.full(1100, 1.9999999)], ("Carry",)),
        "a large one among small ones": ([reals("small ones", 99, (-12, -9)), np.ones(1)], ("Order",)),
        "ties of the last place": ([np.array([2.0**23, 0.5, 1.5, 0.25])], ("Order",)),
        "around 1e-20": ([reals("small", 48, (-67, -64))], ("Range",)),
        "the smallest normal numbers": ([reals("smallest", 48, (-126, -125))], ("Range",)),
        "next to the largest number": ([reals("next to the largest", 3, (125, 125))], ("Range",)),
        "past the largest number": ([np.full(16, 3e38)], ("Range",)),
        "no element": ([np.zeros(0)], ("Special",)),
        "zeros of both signs": ([np.array([0.0, -0.0])], ("Special",)),
        "subnormal numbers alone": ([np.array([1e-40, -1e-39])], ("Special",)),
        "an infinity": ([np.ones(2), np.array([-inf])], ("Special",)),
        "NaN beside an infinity": ([np.array([nan]), np.array([inf])], ("Special",)),
    }
    found = [_norm_case(comment, arrays, flags) for comment, (arrays, flags) in norms.items()]
    u = reals("updates", 24, (-4, 3))
    for norm in (0.5, 2.0, np.nextafter(np.float32(2), np.float32(3)), 7.0, 1e30, inf, nan):
        found.append(_clip_case(u, norm, 2.0))
    return [*found, _clip_case(u, 3.0, 0.0), _clip_case(np.zeros(3), 0.0, 0.0)]


def _norm_case(comment: str, arrays, flags) -> Case:
    arrays = [np.asarray(x, np.float32) for x in arrays]
    with np.errstate(over="ignore"):
        norm = global_norm(arrays, exact=True)
    inputs = {f"x{i}": Array.of(x) for i, x in enumerate(arrays)}
    return Case("global_norm", comment, {}, inputs, {"norm": Array.of(norm, compare="bits")}, flags, ("N2",))


def _clip_case(u: np.ndarray, norm: float, max_norm: float) -> Case:
    u, given = np.asarray(u, np.float32), np.float32(norm)
    with np.errstate(invalid="ignore"):
        clipped = clip(u, given, max_norm)
    inputs = {"u": Array.of(u), "norm": Array.of(given), "max_norm": Array.of(np.float32(max_norm))}
    outputs = {"u": Array.of(clipped, compare="bits")}
    return Case("clip", f"norm {given:.8g} under {max_norm:.8g}", {}, inputs, outputs, (), ("N3",))
