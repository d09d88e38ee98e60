"""LAMB: norms, ratios of norms that are given, and whole steps."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import describe, step_case
from halfstep_spec.numbers.norms import norm
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lamb import Lamb
from halfstep_spec.rules.trust_ratio import ScaleByTrustRatio, scale_by_tempered_trust_ratio
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Array, Case
from halfstep_spec.weights.weight_storage import PARAM_STORAGES

NOTES = {
    "Range": "elements whose squares underflow or overflow in float32",
    "Special": "zeros, infinities, NaN, an empty array",
    "Zero": "a norm of 0, of the weights, of the update or of both: the ratio is 1, before it is bounded",
    "Bounds": "bounds on norms or on the ratio that matter",
    "Power": "the ratio of lamb16",
    "Given": "max_norm is 0, so that every norm of weights counts as 0, and the ratio is 1: what a step does "
    "with a ratio that is given, to the bit",
    "Exact": "the ratio is of norms that are sums of integers: weights are compared to the bit",
    "Order": "the ratio depends on the order of a sum: weights are compared in ulps",
}

_STEPS, _SHAPE, _SIZE = 5, (8, 6), 48
_UNIT = 2.0**-24


def cases() -> list[Case]:
    """Return the cases of lamb.json."""
    steps = [*_given_cases(), *_exact_cases(), *_step_cases()]
    return [*_norm_cases(), *_ratio_cases(), *_power_cases(), *steps, *_own_norm_cases()]


def _norm_cases():
    inf, nan = np.inf, np.nan
    rows = {
        "one element: exact": (reals("one element", 1, (-3, 2)), ()),
        "two equal elements": (np.full(2, 3.0), ()),
        "a row": (reals("a row", 48, (-6, 3)), ()),
        "a matrix": (reals("a matrix", 960, (-4, 0)).reshape(40, 24), ()),
        "around 1e-20": (reals("small", 48, (-67, -64)), ("Range",)),
        "around 1e20": (reals("large", 48, (63, 66)), ("Range",)),
        "the smallest normal numbers": (reals("smallest", 48, (-126, -125)), ("Range",)),
        "next to the largest number": (reals("next to the largest", 3, (125, 125)), ("Range",)),
        "sixty binades": (reals("sixty binades", 48, (-40, 19)), ("Range",)),
        "past the largest number": (np.full(16, 3e38), ("Range",)),
        "empty": (np.zeros(0), ("Special",)),
        "zeros of both signs": (np.array([0.0, -0.0]), ("Special",)),
        "an infinity": (np.array([1, -inf, 2]), ("Special",)),
        "a NaN": (np.array([1, nan, 2]), ("Special",)),
        "NaN beside an infinity": (np.array([inf, nan]), ("Special",)),
    }
    for comment, (x, flags) in rows.items():
        yield _norm_case(comment, np.asarray(x, np.float32), "float32", flags)
    for dtype in ("bfloat16", "float16"):
        yield _norm_case(f"{dtype}: the norm is float32", reals(dtype, 48, (-6, 3)), dtype, ())
    yield _norm_case("bfloat16 around 1e-20", reals("small bfloat16", 48, (-67, -64)), "bfloat16", ("Range",))


def _norm_case(comment: str, x: np.ndarray, dtype: str, flags) -> Case:
    with np.errstate(invalid="ignore", over="ignore"):
        bits = round_to(x, dtype)
        n = norm(decode(bits, dtype))
    compare = "bits" if x.size <= 1 or not np.isfinite(n) or n == 0 else _ulps(*_norm_ulps(x.size))
    inputs = {"x": Array.of(bits, dtype)}
    return Case("norm", comment, {}, inputs, {"norm": Array.of(n, compare=compare)}, flags, ("L1",))


def _norm_ulps(n: int) -> tuple[int, str]:
    return n + 2, (
        f"two sums of {n} squares in different orders: each is off by at most n 2^-24, its root by half of "
        "that and one rounding"
    )


def _ulps(ulps: int, because: str) -> dict:
    return {"ulps": ulps, "because": because}


def _ratio_cases():
    p, u = np.abs(reals("weights' norms", 16, (-8, 8))), np.abs(reals("updates' norms", 16, (-8, 8)))
    wide = np.abs(reals("wide norms", 16, (-60, 60)))
    inf, nan = np.inf, np.nan
    zero_p, zero_u = np.array([0, 0, 3, 3, 0, inf, nan, 0]), np.array([0, 5, 0, 5, inf, 0, 0, nan])
    odd_p, odd_u = np.array([inf, 1, inf, nan, 1, 1e30, 1e-30]), np.array([1, inf, inf, 1, nan, 1e-30, 1e30])
    yield _ratio_case("plain", p, u, ScaleByTrustRatio())
    yield _ratio_case("over many binades", wide, wide[::-1], ScaleByTrustRatio(), ("Range",))
    yield _ratio_case("a coefficient and an eps", p, u, ScaleByTrustRatio(trust_coefficient=0.3, eps=0.1))
    yield _ratio_case("zeros", zero_p, zero_u, ScaleByTrustRatio(), ("Zero",))
    yield _ratio_case("zeros, eps", zero_p, zero_u, ScaleByTrustRatio(eps=0.1), ("Zero",))
    yield _ratio_case(
        "zeros, raised by min_norm", zero_p, zero_u, ScaleByTrustRatio(min_norm=0.7), ("Zero", "Bounds")
    )
    bounded = ScaleByTrustRatio(min_ratio=0.2, max_ratio=0.9)
    yield _ratio_case("zeros, ratio bounded", zero_p, zero_u, bounded, ("Zero", "Bounds"))
    yield _ratio_case("norms that are no numbers", odd_p, odd_u, ScaleByTrustRatio(), ("Special",))
    rows = {
        "min_norm": ScaleByTrustRatio(min_norm=2.5),
        "max_norm": ScaleByTrustRatio(max_norm=2.5),
        "both, and they are equal": ScaleByTrustRatio(min_norm=2.5, max_norm=2.5),
        "ratio bounded": ScaleByTrustRatio(min_ratio=0.5, max_ratio=1.5),
        "everything": ScaleByTrustRatio(0.5, 1.3, 1e-3, 10.0, 0.1, 5.0),
    }
    for comment, trust in rows.items():
        yield _ratio_case(comment, p, u, trust, ("Bounds",))


def _power_cases():
    p, u = np.abs(reals("weights' norms", 16, (-4, 4))), np.abs(reals("updates' norms", 16, (-4, 4)))
    zero_p, zero_u = np.array([0, 0, 3, np.nan]), np.array([0, 5, 0, 1])
    for lr in (1e-3, 1e-2):
        yield _ratio_case(f"lr {lr}", p, u, scale_by_tempered_trust_ratio(lr, 0.382), ("Power",))
    yield _ratio_case("another power", p, u, scale_by_tempered_trust_ratio(1e-2, 0.9), ("Power",))
    yield _ratio_case("max_norm", p, u, scale_by_tempered_trust_ratio(1e-2, 0.5, 1.0), ("Power", "Bounds"))
    yield _ratio_case("zeros", zero_p, zero_u, scale_by_tempered_trust_ratio(1e-2, 0.382), ("Power", "Zero"))
    yield _ratio_case(
        "a learning rate of 0: 2", p, u, scale_by_tempered_trust_ratio(0.0, 0.382), ("Power", "Special")
    )


def _ratio_case(comment: str, p_norm, u_norm, trust: ScaleByTrustRatio, flags=()) -> Case:
    p_norm, u_norm = (np.asarray(x, np.float32) for x in (p_norm, u_norm))
    ratio = trust.ratio(p_norm, u_norm)
    inputs = _numbers_of(trust) | {"p_norm": Array.of(p_norm), "u_norm": Array.of(u_norm)}
    compare = "bits"
    if trust.power is not None:
        # exp(y), y = power log(x), where the result is between 2^-12 and the bound of 2.
        compare = _ulps(
            48, "exp(y) of a y of at most 9: relative error 4 |y| 2^-24 from y, and of exp itself"
        )
        assert ratio[ratio > 0].min() > 2.0**-12
    return Case(
        "trust_ratio", comment, {}, inputs, {"ratio": Array.of(ratio, compare=compare)}, flags, ("L2",)
    )


def _numbers_of(trust: ScaleByTrustRatio) -> dict[str, Array]:
    values = {name: x for name, x in vars(trust).items() if x is not None and not isinstance(x, bool)}
    return {name: Array.of(np.float32(value)) for name, value in values.items()}


def _own_norm_cases() -> Iterable[Case]:
    """Return cases of the whole link, with exact norms, of which that of the update is past the largest."""
    p, huge = reals("weights of huge updates", 16, (-3, 0)), np.asarray(np.full(16, -3e38), np.float32)
    rows = {
        "norm past the largest number": ScaleByTrustRatio(exact=True),
        "the same, everything given": ScaleByTrustRatio(1.5, 1.3, 1e30, 2.0, 1e-30, 5.0, exact=True),
        "the same, the ratio at its lower bound": ScaleByTrustRatio(min_ratio=1e-20, exact=True),
        "the same, weights of 0": ScaleByTrustRatio(max_norm=0.0, exact=True),
    }
    for comment, trust in rows.items():
        with np.errstate(over="ignore", under="raise"):
            u = trust.update(huge, p, None, None)
        inputs = _numbers_of(trust) | {"p": Array.of(p), "u": Array.of(huge)}
        outputs = {"u": Array.of(u, compare="bits")}
        yield Case("trust_ratio", comment, {"exact": True}, inputs, outputs, ("Range",), ("N2", "L2"))


_SMALL: dict[str, Any] = {"block_size": 4, "min_size": 0, "min_ndim": 0}
_LOW = functools.partial(ScaleByAdam, eps=1e-6, mu_dtype="bfloat16", nu_dtype="bfloat16", seed=42)
_FULL = functools.partial(ScaleByAdam, eps=1e-6, seed=42)
_LAMB16 = functools.partial(
    ScaleByAdam,
    eps=1e-6,
    mu_dtype=scaled("float8_e4m3fn", **_SMALL),
    nu_dtype=scaled("ufloat8_e5m3", **_SMALL),
    seed=42,
)


def _given_cases():
    given = functools.partial(Lamb, weight_decay=0.1, max_norm=0.0)
    for dtype in ("bfloat16", "float32"):
        for storage in PARAM_STORAGES:
            if dtype == "bfloat16" or storage == "stochastic":
                step = given(_LOW(), param_dtype=dtype, param_storage=storage)
                yield _step_case(step, storage, ("Given",))
    yield _step_case(given(_LAMB16()), "lamb16's formats", ("Given",))
    yield _step_case(given(_LOW(bias_correction=False)), "no bias correction", ("Given",))
    yield _step_case(given(_FULL(bias_correction=False, eps_root=1e-3)), "eps_root", ("Given",))


def _exact_cases():
    exact = functools.partial(Lamb, weight_decay=0.1, exact=True)
    rows = {
        "float32, max_norm": exact(_FULL(), max_norm=2.0, param_dtype="float32"),
        "bfloat16 weights": exact(_LOW()),
        "bfloat16 weights, master": exact(_LOW(), param_storage="master"),
        "lamb16's formats": exact(_LAMB16()),
    }
    for comment, step in rows.items():
        yield _step_case(step, f"{comment}, exact norms", ("Exact",))


def _step_cases():
    low = functools.partial(Lamb, weight_decay=0.1)
    wide = functools.partial(low, param_dtype="float32")
    rows = {
        "float32": wide(_FULL()),
        "no decay": wide(_FULL(), weight_decay=0.0),
        "no bias correction": wide(_FULL(bias_correction=False)),
        "max_norm": wide(_FULL(), max_norm=2.0),
        "16-bit moments": wide(_LOW()),
        "lamb16's formats": wide(_LAMB16()),
        "lamb16's ratio": wide(_LAMB16(), trust_power=0.382),
        "bfloat16 weights": low(_LOW()),
        "bfloat16 weights, nearest": low(_LOW(), param_storage="nearest"),
        "bfloat16 weights, master": low(_LOW(), param_storage="master"),
        "bfloat16 weights, lamb16": low(_LAMB16(), trust_power=0.382),
    }
    for comment, step in rows.items():
        yield _step_case(step, comment, ("Order",))


def _step_case(step: Lamb, comment: str, flags) -> Case:
    """Return a case of five steps; weights are compared to the bit where the ratio is given."""
    p = round_to(reals("lamb weights", _SIZE, (-3, 0)).reshape(_SHAPE), step.param_dtype)
    g = reals("lamb gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, *_SHAPE)
    comment = f"{comment}: {step.param_dtype} {step.param_storage} weights, {describe(step.rule)}"
    clauses = ("L3", "L4") if step.trust_power else ("L3", "N2") if step.exact else ("L3",)
    with np.errstate(under="raise"):  # contract A8
        case = step_case(step, comment, p, g, None, 1e-3, flags, clauses)
    if "Order" not in flags:
        return case
    weights = {name: case.outputs[name] for name in ("p", "extra") if name in case.outputs}
    ulps = {name: dataclasses.replace(x, compare=_weight_ulps(case, x)) for name, x in weights.items()}
    return dataclasses.replace(case, outputs=case.outputs | ulps)


def _weight_ulps(case: Case, stored: Array) -> dict:
    """Return how far weights may differ after all steps, because ratios are sums in other orders."""
    if stored.dtype != "float32":
        return _ulps(
            _STEPS, "each step may round a weight to the other neighbour, where the ratio decides it"
        )
    start = decode(case.inputs["p"].bits, case.inputs["p"].dtype)
    weights = np.concatenate([start[None], stored.bits.view(np.float32)]).astype(np.float64)
    moved = np.abs(np.diff(weights, axis=0)).sum(0)
    ratio = 2 * (_SIZE + 4) * _UNIT
    # Ulps of a number x are at least x 2^-24. A step's effect on the next is far below a quarter of it.
    apart = 1.25 * moved * ratio / (np.abs(weights[1:]).min(0) * _UNIT) + 2 * _STEPS
    return _ulps(
        math.ceil(apart.max()),
        f"two ratios of norms of {_SIZE} elements are at most 2 (n + 4) 2^-24 apart, which is a share of the "
        f"way that a weight went; and two roundings in each of {_STEPS} steps",
    )
