"""The steps whose programs are executed: every rule, format and weight storage, and numbers that are hard.

Of 16 bits that the rounding of a bfloat16 weight discards, one unit in the last place of float32 moves the
result with a chance of 2^-16. So every format is also run with float32 weights, and every rule with float32
moments and weights, which hide nothing.
"""

import functools
from collections.abc import Callable

import numpy as np

import halfstep_spec as spec
from halfstep_spec.cases.steps import step_case
from halfstep_spec.vectors import Case

SMALL, MIDDLE, LARGE = (40, 384), (256, 1024), (512, 1024)
"""XLA makes other programs for other shapes."""

_RATE = 1e-3
_BF16 = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
_FLOAT32 = {"mu_dtype": "float32", "nu_dtype": "float32"}
_STOCHASTIC = {"mu_rounding": "stochastic"}


def _formats() -> dict[str, dict]:
    """Return the dtypes of moments, by name."""
    scaled, codebook, relative = spec.scaled, spec.codebook, spec.relative
    pairs = {
        "float32": ("float32", "float32"),
        "bfloat16": ("bfloat16", "bfloat16"),
        "ufloat8_e6m2": ("bfloat16", "ufloat8_e6m2"),
        "float16": (scaled("float16"), scaled("float16")),
        "e4m3fn, ufloat8_e5m3": (scaled("float8_e4m3fn"), scaled("ufloat8_e5m3")),
        "e5m2": (scaled("float8_e5m2"), scaled("float8_e5m2")),
        "e3m4, ufloat8_e4m4": (scaled("float8_e3m4"), scaled("ufloat8_e4m4")),
        "int8, ufloat8_e4m4": (scaled("int8"), scaled("ufloat8_e4m4")),
        "fp8 by row": (scaled("float8_e4m3fn", "row"), scaled("ufloat8_e5m3", "row")),
        "8-bit codebooks": (codebook("dynamic8"), codebook("udynamic8")),
        "4-bit codebooks": (codebook("dynamic4"), codebook("udynamic4")),
        "ulinear4": ("bfloat16", codebook("ulinear4")),
        # The recipes one_pass, eight_bit and four_bit.
        "relative e3m4, ufloat8_e6m2": (relative("float8_e3m4"), "ufloat8_e6m2"),
        "relative e3m4, ufloat8_e5m3": (relative("float8_e3m4"), scaled("ufloat8_e5m3")),
        "relative int4, ufloat8_e5m3": (relative("int4", 32), scaled("ufloat8_e5m3")),
        "relative int8 by block": (relative("int8", 128), "ufloat8_e6m2"),
    }
    return {name: {"mu_dtype": mu, "nu_dtype": nu, **_STOCHASTIC} for name, (mu, nu) in pairs.items()}


def steps() -> dict[str, spec.Step]:
    """Return what is run, by name: the contract's steps."""
    found = {}

    def add(name: str, rule: spec.Rule, dtype: str, storage: str = "stochastic", make: Callable = spec.Step):
        found[name] = make(rule, 0.1, "decoupled", dtype, storage)

    for storage in spec.PARAM_STORAGES:
        add(f"AdamW, {storage}", spec.ScaleByAdam(**_BF16, **_STOCHASTIC), "bfloat16", storage)
    add("AdamW, float16 weights", spec.ScaleByAdam(**_BF16, **_STOCHASTIC), "float16")
    for name, options in _formats().items():
        for dtype in ("bfloat16", "float32"):
            add(f"AdamW, {name}, {dtype} weights", spec.ScaleByAdam(**options), dtype)
    for dtype in ("bfloat16", "float32"):
        moments = {"bfloat16": _BF16, "float32": _FLOAT32}[dtype]
        mu = {"mu_dtype": dtype, **_STOCHASTIC}
        fp8 = spec.scaled("float8_e4m3fn")
        lamb = functools.partial(spec.Lamb, max_norm=10.0, exact=True)
        rules = {
            "AdamW, nesterov": spec.ScaleByAdam(**moments, **_STOCHASTIC, nesterov=True),
            "AdamW, eps_root": spec.ScaleByAdam(**moments, **_STOCHASTIC, eps_root=1e-12),
            "Lion": spec.ScaleByLion(**mu),
            "momentum": spec.Trace(0.9, accumulator_dtype=dtype),
            "Adan": spec.RULES["adan"](**moments, diff_dtype=dtype, grad_dtype=dtype, **_STOCHASTIC),
            "store_state": spec.StoreState(spec.ScaleByAdam(**_FLOAT32), fp8),
        }
        for name, rule in rules.items():
            add(f"{name}, {dtype}", rule, dtype)
        add(f"LAMB, {dtype}", spec.ScaleByAdam(**moments, **_STOCHASTIC, eps=1e-6), dtype, make=lamb)
    return found


def case(name: str, shape: tuple[int, ...], count: int) -> Case:
    """Return so many steps of a name, with what the contract says they give."""
    p, gradients = numbers(shape, count)
    step = steps()[name]
    return step_case(step, name, spec.round_to(p, step.param_dtype), gradients, None, _RATE, (), ())


def numbers(shape: tuple[int, ...], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and a gradient for each step: over many binades, with every special number."""
    rng, tiny = np.random.default_rng(seed), 2.0**-126
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.38e38, -3.38e38, tiny, -tiny, tiny / 2, 1e-40, -1e-45]
    special += [1.0, -1.0, 1e30, 1e-30, 65504, 448, 2.0**-24, 2.0**-127]

    def wide(*axes: int, low: int, high: int) -> np.ndarray:
        return rng.normal(0, 1, axes) * np.exp2(rng.integers(low, high, axes))

    p = wide(*shape, low=-12, high=4)
    p.ravel()[:400] = rng.choice(special, p.ravel()[:400].shape)
    every = count, *shape
    g = np.where(rng.random(every) < 0.2, wide(*every, low=-120, high=60), wide(*every, low=-24, high=2))
    g *= rng.random(every) < 7 / 8
    # Two rows of three have none of them: one marks a whole block.
    rows = (np.arange(shape[0]) % 3 == 0).reshape(-1, *([1] * (len(shape) - 1)))
    g = np.where((rng.random(every) < 0.3) & rows, rng.choice(special, every), g)
    return p.astype(np.float32), g.astype(np.float32)


def nearly_subnormal(case: Case) -> np.ndarray:
    """Tell of each step and weight whether it has had a gradient of which a product may be subnormal (A8)."""
    g = spec.decode(case.inputs["g"].bits, case.inputs["g"].dtype)
    return np.logical_or.accumulate((g != 0) & (np.abs(g) < 2.0**-100))
