"""LAMB in both frameworks: moments to the bit, weights to within what the order of a sum decides."""

import functools

import numpy as np
import pytest

import halfstep_jax
import halfstep_torch
from backends.on_torch import from_torch
from compare import assert_same
from twin.test_storage_twin import RULES, patterns, run_jax, run_torch

LR, DECAY, SHAPE = 1e-2, 0.1, (24, 40)
UNIT = 2.0**-24

# mu, nu, weights' dtype, storage, options of lamb16 (None: lamb)
GRID = [
    ("float32", "float32", "float32", "nearest", None),
    ("bfloat16", "bfloat16", "float32", "nearest", None),
    ("bfloat16", "bfloat16", "bfloat16", "stochastic", None),
    ("scaled float8_e4m3fn", "scaled ufloat8_e5m3", "bfloat16", "stochastic", {"trust_power": None}),
    ("scaled float8_e4m3fn", "scaled ufloat8_e5m3", "bfloat16", "split16", {"trust_power": 0.382}),
    ("scaled int8", "scaled uroot8", "bfloat16", "master", {"trust_power": 0.5, "max_norm": 3.0}),
    ("float32", "scaled float16", "bfloat16", "compensated", {"bias_correction": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", GRID, ids=lambda s: "-".join(map(str, s)))
def test_lamb_has_the_same_moments_and_weights_as_near_as_sums_are(setting):
    mu, nu, dtype, storage, options = setting
    steps, rows = 5, [("weights", 0), *(("gradients", t) for t in range(5))]
    bits = [patterns(name, t, SHAPE) for name, t in rows]
    start = (bits[0].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float32":  # of numbers that bfloat16 holds
        bits = [x.astype(np.uint32) << 16 for x in bits]
    makes = (
        (halfstep_jax.lamb, halfstep_torch.Lamb)
        if options is None
        else (
            halfstep_jax.lamb16,
            halfstep_torch.Lamb16,
        )
    )
    given = {"weight_decay": DECAY, **(options or {})}
    rule = RULES["adam"]._replace(
        jax=functools.partial(makes[0], **given),
        torch=functools.partial(makes[1], **given, compile=False),
    )
    run = (rule, dtype, (mu, nu), storage, bits[0], bits[1:], LR, 8)
    (_, our_weights, *ours), (_, their_weights, *theirs) = run_jax(*run), run_torch(*run)
    for name, a, b in zip(rule.stored, ours, theirs, strict=True):
        assert_same(a, from_torch(b, a.dtype), f"{setting}, {name}, JAX against torch")
    our_weights = our_weights.bits.reshape(SHAPE).view(np.float32).astype(np.float64)
    their_weights = their_weights.double().numpy()
    moved = np.abs(their_weights - start).max()
    apart = np.abs(our_weights - their_weights)
    # Ratios of norms are at most 2 (n + 4) 2^-24 apart, of what a step moves; then weights round, in each
    # step at most to the other neighbour.
    n, rounding = start.size, 2 * UNIT
    if dtype == "bfloat16":
        rounding = {"split16": 2 * UNIT, "master": 2 * UNIT, "compensated": 2.0**-15}.get(storage, 2.0**-7)
    step = LR * np.linalg.norm(start)
    bound = 1.25 * steps * (step * 2 * (n + 4) * UNIT + rounding * np.abs(their_weights))
    assert (apart <= bound).all()
    assert moved > 5e-3
    if storage == "stochastic":
        # Of the roundings, only those do differ whose fraction and word are that near: about one in 10,000.
        assert (apart > 0).mean() < 0.01
