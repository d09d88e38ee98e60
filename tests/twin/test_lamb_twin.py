"""LAMB in both frameworks: moments to the bit, weights to within what the order of a sum decides."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from backends.on_jax import from_jax
from backends.on_torch import from_torch
from compare import assert_same
from twin.test_storage_twin import RULES, make_options, patterns

LEAF, SEED, LR, DECAY, SHAPE = "encoder/kernel", 12345, 1e-2, 0.1, (24, 40)
UNIT = 2.0**-24

# mu, nu, weights' dtype, storage, options of lamb16 (None: lamb)
GRID = [
    ("float32", "float32", "float32", "nearest", None),
    ("bfloat16", "bfloat16", "float32", "nearest", None),
    ("bfloat16", "bfloat16", "bfloat16", "stochastic", None),
    ("scaled float8_e4m3fn", "scaled ufloat8_e5m3", "bfloat16", "stochastic", {"trust_power": None}),
    ("scaled float8_e4m3fn", "scaled ufloat8_e5m3", "bfloat16", "split16", {"trust_power": 0.382}),
    ("scaled int8", "scaled ufloat8_e4m4", "bfloat16", "master", {"trust_power": 0.5, "max_norm": 3.0}),
    ("float32", "scaled float16", "bfloat16", "compensated", {"bias_correction": False}),
]


def values(name: str, step: int) -> np.ndarray:
    """Return float32 values that bfloat16 holds, over eight binades up to 1."""
    return (patterns(name, step, SHAPE).astype(np.uint32) << 16).view(np.float32)


def run_jax(mu, nu, dtype, storage, options, steps):
    make = halfstep_jax.lamb if options is None else halfstep_jax.lamb16
    moments = make_options(halfstep_jax, RULES["adam"], mu, nu, 8)
    tx = make(LR, weight_decay=DECAY, **moments, param_storage=storage, seed=SEED, **(options or {}))

    def tree(x):
        return {"encoder": {"kernel": jnp.asarray(x).astype(dtype)}}

    @jax.jit
    def step(params, state, updates):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    params = tree(values("weights", 0))
    state = tx.init(params)
    for t in range(steps):
        params, state = step(params, state, tree(values("gradients", t)))
    trees = (optax.tree.get(state, "mu"), optax.tree.get(state, "nu"))
    full = halfstep_jax.float32_params(params, state)["encoder"]["kernel"]
    return [from_jax(jax.tree.leaves(x)[0]) for x in trees], np.asarray(full, np.float64)


def run_torch(mu, nu, dtype, storage, options, steps):
    make = halfstep_torch.Lamb if options is None else halfstep_torch.Lamb16
    moments = make_options(halfstep_torch, RULES["adam"], mu, nu, 8)
    p = torch.nn.Parameter(torch.from_numpy(values("weights", 0)).to(getattr(torch, dtype)))
    rest = {"param_storage": storage, "seed": SEED, "compile": False, **(options or {})}
    optimizer = make([(LEAF.replace("/", "."), p)], lr=LR, weight_decay=DECAY, **moments, **rest)
    for t in range(steps):
        p.grad = torch.from_numpy(values("gradients", t)).to(p.dtype)
        optimizer.step()
    (full,) = halfstep_torch.float32_params(optimizer).values()
    state = optimizer.state[p]
    return [from_torch(state[key]) for key in ("exp_avg", "exp_avg_sq")], full.double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("setting", GRID, ids=lambda s: "-".join(map(str, s)))
def test_lamb_has_the_same_moments_and_weights_as_near_as_sums_are(setting):
    _, _, dtype, storage, _ = setting
    steps = 5
    (ours, our_weights), (theirs, their_weights) = run_jax(*setting, steps), run_torch(*setting, steps)
    for name, a, b in zip(("mu", "nu"), ours, theirs, strict=True):
        assert_same(a, b, f"{setting}, {name}, JAX against torch")
    start = values("weights", 0).astype(np.float64)
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
