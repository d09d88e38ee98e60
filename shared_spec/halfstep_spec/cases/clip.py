"""Norms of many arrays, added in integers, and updates clipped by a norm that is given."""

from collections.abc import Iterable

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.numbers.global_norm import global_norm
from halfstep_spec.rules.clip import clip, clip_by_global_norm
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
    norm_cases = [_norm_case(comment, arrays, flags) for comment, (arrays, flags) in norms.items()]
    norm_cases.append(_float32_norm_case(np.split(reals("parts", 96, (-6, 3)), [7, 40])))
    u = reals("updates", 24, (-4, 3))
    for norm in (0.5, 2.0, np.nextafter(np.float32(2), np.float32(3)), 7.0, 1e30, inf, nan):
        norm_cases.append(_clip_case(u, norm, 2.0))
    given = [*norm_cases, _clip_case(u, 3.0, 0.0), _clip_case(np.zeros(3), 0.0, 0.0)]
    return [*given, *_own_norm_cases()]


def _norm_case(comment: str, arrays, flags) -> Case:
    arrays = [np.asarray(x, np.float32) for x in arrays]
    with np.errstate(over="ignore"):
        norm = global_norm(arrays, exact=True)
    inputs = {f"x{i}": Array.of(x) for i, x in enumerate(arrays)}
    outputs = {"norm": Array.of(norm, compare="bits")}
    return Case("global_norm", comment, {}, inputs, outputs, flags, ("N1", "N2"))


def _float32_norm_case(arrays) -> Case:
    """Return a case of a norm without a fixed order of sums, which may be computed from norms of parts."""
    size = sum(x.size for x in arrays)
    compare = {
        "ulps": size + len(arrays) + 4,
        "because": f"two sums of {size} squares in other orders, or one of squares of {len(arrays)} norms: "
        "a sum of n is off by at most n 2^-24, a root by half of that and one rounding",
    }
    inputs = {f"x{i}": Array.of(x) for i, x in enumerate(arrays)}
    outputs = {"norm": Array.of(global_norm(arrays), compare=compare)}
    comment = f"the norm in float32 of {len(arrays)} arrays"
    return Case("global_norm", comment, {"exact": False}, inputs, outputs, (), ("N1", "L1"))


def _clip_case(u: np.ndarray, norm: float, max_norm: float) -> Case:
    u, given = np.asarray(u, np.float32), np.float32(norm)
    with np.errstate(invalid="ignore"):
        clipped = clip(u, given, max_norm)
    inputs = {"u": Array.of(u), "norm": Array.of(given), "max_norm": Array.of(np.float32(max_norm))}
    outputs = {"u": Array.of(clipped, compare="bits")}
    return Case("clip", f"norm {given:.8g} under {max_norm:.8g}", {}, inputs, outputs, (), ("N3",))


def _own_norm_cases() -> Iterable[Case]:
    """Return cases of the whole link with an exact norm above float32's largest number, or just below."""
    past, mixed = (
        np.full(16, 3e38),
        np.concatenate([np.full(9, -2.9e38), reals("beside 1e38", 23, (90, 126))]),
    )
    rows = {
        "finite, norm past the largest number": (past, 1.0),
        "the same under a bound near the largest number": (past, 3e38),
        "the same under no bound": (past, np.inf),
        "elements of 36 binades": (mixed, 2.0),
        "a quotient that would be subnormal": (past[:1], 1.0),
        "norm of 2^100": (np.full(16, 2.0**98), 1.0),
        "an infinity among them": (np.concatenate([past, [np.inf]]), 1.0),
    }
    for comment, (u, max_norm) in rows.items():
        u = np.asarray(u, np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            clipped = clip_by_global_norm(u, max_norm, exact=True)
        inputs = {"u": Array.of(u), "max_norm": Array.of(np.float32(max_norm))}
        outputs = {"u": Array.of(clipped, compare="bits")}
        yield Case("clip", comment, {"exact": True}, inputs, outputs, ("Range",), ("N2", "N3"))
