"""LAMB: norms that neither under- nor overflow, the trust ratio, steps over devices. Contract: L."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from halfstep_jax.numbers.norms import Norms, _complex_sums, _squares_by_range, _sums, norms
from halfstep_jax.rules.trust_ratio import scale_by_tempered_trust_ratio
from halfstep_jax.storage.formats import Encoded
from on_jax.steps import gradients, moments, run, sharded, weights

UNIT = 2.0**-24
LR = 1e-2


def norm_bound(n: int) -> float:
    """Return how far off a float32 norm of n elements is at most, relatively, in any order (contract L1)."""
    return (n / 2 + 2) * UNIT


def norm(x):
    return norms(x).whole


def reals(n: int, scale: float, seed: int = 3) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_neither_underflows_nor_overflows(scale, compiled):
    x = reals(1000, scale)
    n = (jax.jit(norm) if compiled else norm)(x)
    exact = np.linalg.norm(x.astype(np.float64))
    assert n.dtype == jnp.float32
    assert abs(float(n) / exact - 1) < norm_bound(1000)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_norm_of_16_bit_weights_is_float32(dtype):
    x = jnp.asarray(reals(1000, 1.0)).astype(dtype)
    exact = np.linalg.norm(np.asarray(x, np.float64))
    assert norm(x).dtype == jnp.float32
    assert abs(float(norm(x)) / exact - 1) < norm_bound(1000)
    assert float(norm(x)) != float(norm(x).astype(dtype))


def test_norms_of_nothing_zeros_and_what_is_no_number():
    assert norm(jnp.zeros(0)) == 0
    assert norm(jnp.zeros((3, 4))) == 0
    assert norm(jnp.float32(-3)) == 3
    assert norm(jnp.array([1, -jnp.inf])) == jnp.inf
    assert jnp.isnan(norm(jnp.array([1, jnp.nan, jnp.inf])))


@pytest.mark.parametrize("add_both", [_sums, _complex_sums])
@pytest.mark.parametrize("shape", [(), (1,), (1000,), (7, 200), (5, 40, 4)], ids=str)
def test_the_norm_of_one_pass_is_that_of_two(shape, add_both):
    # What a TPU and a GPU compute; here as well, so that it can be seen.
    one_pass, x = jax.jit(functools.partial(_squares_by_range, add_both=add_both)), reals(2000, 1.0)
    x = x[: math.prod(shape)].reshape(shape)
    wide = x * np.exp2(np.random.default_rng(4).integers(-90, 90, shape)).astype(np.float32)
    for scaled in (*(x * np.float32(2.0**e) for e in range(-96, 125, 4)), wide, 0 * x):
        total, field = one_pass(scaled)
        exact = np.linalg.norm(scaled.astype(np.float64))
        found = float(total) ** 0.5 * 2.0 ** (int(field) - 127)
        assert abs(found - exact) <= exact * norm_bound(x.size)


@pytest.mark.parametrize("add_both", [_sums, _complex_sums])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, -np.inf], [1e30, 1e-30]], np.inf),
        ([[1, np.nan], [1e30, np.inf]], np.nan),
        ([[3e38] * 64, [1] * 64], np.inf),
    ],
    ids=["infinity", "nan", "too large"],
)
def test_what_is_no_number_is_seen_in_one_pass(rows, expected, add_both):
    total, field = _squares_by_range(jnp.array(rows, jnp.float32), add_both)
    norms, are_large = Norms.of(jnp.sqrt(total), field), np.max(rows) > 1e38
    np.testing.assert_equal(float(norms.whole), expected)
    np.testing.assert_allclose(norms.moved, 2.0**-64 * 3e38 * 8 if are_large else expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [10**7, 10**8])
def test_the_norm_of_a_large_layer_is_as_good_as_that_of_a_small_one(n):
    # Sums of halves are off by about log2(n) roundings; one after the other, they would be by up to n.
    x = reals(n, 1.0)
    exact = np.sqrt(sum(float(part.astype(np.float64) @ part) for part in np.split(x, 100)))
    assert abs(float(jax.jit(norm)(x)) / exact - 1) < 30 * UNIT


@pytest.mark.parametrize("axes", [("x", "y"), (("x", "y"), None), (None, "x")], ids=str)
def test_the_norm_over_eight_devices_is_that_of_one(axes):
    x = weights((16, 24), "float32")
    exact = np.linalg.norm(np.asarray(x, np.float64))
    assert abs(float(jax.jit(norm)(sharded(x, *axes))) / exact - 1) < norm_bound(384)


def scaled_by_ratio(tx, p, u):
    updates, _ = jax.jit(tx.update)(
        {"w": jnp.asarray(u)}, tx.init({"w": jnp.asarray(p)}), {"w": jnp.asarray(p)}
    )
    return np.asarray(updates["w"])


def test_tiny_and_huge_weights_have_the_ratio_of_others():
    # Optax gives 1 for weights of 1e-20, whose squares underflow, and infinity for weights of 1e20.
    u = np.ones(4, np.float32)
    for size in (1e-20, 1.0, 1e20):
        p = np.full(4, size, np.float32)
        np.testing.assert_array_equal(scaled_by_ratio(hs.scale_by_trust_ratio(), p, u), p)
        np.testing.assert_array_equal(scaled_by_ratio(hs.scale_by_trust_ratio(), u, p), u)
    # Elements are float32 numbers, and their norm of 2^128 is above the largest. At a power of a half the
    # ratio is 2^-63.5.
    huge, power = (
        np.full(4, 2.0**127, np.float32),
        scale_by_tempered_trust_ratio(learning_rate=1e-3, trust_power=0.5),
    )
    np.testing.assert_array_equal(scaled_by_ratio(hs.scale_by_trust_ratio(), u, huge), u)
    np.testing.assert_allclose(scaled_by_ratio(power, u, huge), 2.0**63.5, rtol=1e-5)
    theirs = scaled_by_ratio(optax.scale_by_trust_ratio(), np.full(4, 1e-20, np.float32), u)
    np.testing.assert_array_equal(theirs, u)


@pytest.mark.parametrize("options", [{}, {"min_norm": 0.5}, {"eps": 0.1, "trust_coefficient": 0.3}], ids=str)
@pytest.mark.parametrize("p", [0.0, 2.0], ids=["p=0", "p=2"])
@pytest.mark.parametrize("u", [0.0, 0.25, 3.0], ids=["u=0", "u=1/4", "u=3"])
def test_zeros_and_small_norms_are_handled_as_in_optax(p, u, options):
    p, u = np.full(1, p, np.float32), np.full(1, u, np.float32)
    ours, theirs = (scaled_by_ratio(m.scale_by_trust_ratio(**options), p, u) for m in (hs, optax))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_sharded_steps_keep_shardings_and_give_the_weights_of_one_device():
    p, rows = {"w": weights((16, 24), "float32")}, {"w": gradients(3, (16, 24))}
    alone, _ = run(hs.lamb(LR, weight_decay=0.1), p, rows)
    parts = {"w": sharded(p["w"], "x", "y")}
    together, state = run(hs.lamb(LR, weight_decay=0.1), parts, {"w": sharded(rows["w"], None, "x", "y")})
    bound = 3 * (LR * float(jnp.linalg.norm(p["w"])) * 4 * norm_bound(384) + 2 * UNIT)
    assert float(jnp.abs(alone["w"] - together["w"]).max()) < bound
    assert together["w"].sharding == parts["w"].sharding
    assert moments(state)[0]["w"].sharding == parts["w"].sharding


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float16"])
def test_ten_million_elements_keep_their_momentum(dtype):
    # LAMB16's published code keeps under 1 % of it.
    shape, fmt = (10_000, 1000), hs.scaled(dtype)
    tx = hs.scale_by_adam(mu_dtype=fmt, nu_dtype="bfloat16")
    step = jax.jit(lambda g, state: tx.update(g, state)[1], donate_argnums=1)
    state, exact = tx.init(jnp.zeros(shape)), np.zeros(shape, np.float32)
    for t in range(8):
        g = jax.random.normal(jax.random.key(t), shape) * np.float32(0.1)
        state, exact = step(g, state), np.float32(0.9) * exact + np.float32(0.1) * np.asarray(g)
    stored = np.asarray(fmt.decode(Encoded(state.mu, state.mu_scale[""])))
    assert abs(np.sqrt(np.mean(stored**2, dtype=np.float64) / np.mean(exact**2, dtype=np.float64)) - 1) < 0.01


def test_a_learning_rate_of_zero_moves_nothing():
    p = {"w": jnp.full(4, 1.0)}
    for rate in (0.0, lambda count: 0.0 * count):
        tx = hs.lamb16(rate, trust_power=0.382)
        updates, _ = jax.jit(tx.update)({"w": jnp.ones(4)}, tx.init(p), p)
        np.testing.assert_array_equal(updates["w"], 0)
