"""AdEMAMix against its formula and Optax's, and its slow average, which moves where others freeze."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import halfstep_jax
import halfstep_spec
from twin.moving import assert_both_end_alike


def test_the_reference_follows_the_paper():
    gradients = np.random.default_rng(0).normal(size=(20, 50))
    rule = halfstep_spec.RULES["ademamix"](eps=0.0)
    state = rule.init((50,))
    for g in gradients:
        u, state = rule.step(g, state, "w")
    # Each of 20 steps rounds three averages, by 2^-24 of magnitudes below 4 times alpha.
    sums = [np.tensordot((1 - b) * b ** np.arange(20)[::-1], x, 1) for b, x in (
        (0.9, gradients), (0.9999, gradients), (0.999, gradients**2))]  # fmt: skip
    fast, slow, v = sums[0] / (1 - 0.9**20), sums[1], sums[2] / (1 - 0.999**20)
    np.testing.assert_allclose(u, (fast + 5 * slow) / np.sqrt(v), atol=20 * 3 * 4 * 2.0**-24)


def test_float32_follows_optax():
    """Optax takes 1 - b2^t from powers, off by 2^-23 of 1 in 1 - b2 = 0.001, and updates by half of that.

    Of 10 steps each is at most 10 at a rate of 1e-2.
    """
    rng = np.random.default_rng(1)
    start, ends = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}, []
    gradients = [{"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)} for _ in range(10)]
    ours = halfstep_jax.scale_by_ademamix(mu_dtype="float32", slow_dtype="float32", nu_dtype="float32")
    for tx in (ours, optax.contrib.scale_by_ademamix()):
        params, state, update = start, tx.init(start), jax.jit(tx.update)
        for g in gradients:
            updates, state = update(g, state)
            params = jax.tree.map(lambda p, u: p - 1e-2 * u, params, updates)
        ends.append(np.asarray(params["w"]))
    np.testing.assert_allclose(*ends, atol=10 * 1e-2 * 10 * 0.5 * 2.0**-23 / 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_the_slow_average_moves_where_nearest_rounding_freezes(dtype):
    """Toward steady gradients of 1, from an average of 0.25: 1,000 steps at 0.9999 close a share of 0.095.

    Each step of bits b rounds stochastically: over 4,096 elements the mean is off by under 1 % of the way.
    """
    fmt = dtype if dtype == "bfloat16" else halfstep_jax.scaled(dtype, 128)
    with pytest.raises(ValueError, match=r"slow_rounding=.nearest. freezes at b3=0.9999"):
        halfstep_jax.scale_by_ademamix(slow_dtype=fmt, slow_rounding="nearest")
    tx = halfstep_jax.scale_by_ademamix(slow_dtype=fmt, nu_dtype="float32", mu_dtype="float32")
    g = {"w": jnp.ones((64, 64))}
    state = tx.init(g)

    def step(state, _):
        return tx.update(g, state)[1], None

    state = jax.jit(lambda state: jax.lax.scan(step, state, None, 1000)[0])(state)
    slow = halfstep_jax.describe(tx, g).of("w", "slow")
    assert slow.rounding == "stochastic"
    updates, _ = tx.update({"w": jnp.zeros((64, 64))}, state)
    # Of that update alpha slow is what remains beside mu, 0.9, and nu, 0.999 of 1 by now.
    found = (
        np.asarray(updates["w"], np.float64).mean() * np.sqrt(0.999 * (1 - 0.999**1000) / (1 - 0.999**1001))
        - 0.9
    ) / 5
    assert abs(found / (0.9999 * (1 - 0.9999**1000)) - 1) < 0.02


@pytest.mark.parametrize("storage", ["bfloat16", "scaled"])
def test_jax_and_torch_agree_to_the_bit(storage):
    def make(package, chain):
        kinds = (package.scaled(x, 8, 0, 0) for x in ("float8_e4m3fn", "int8", "ufloat8_e5m3"))
        kinds = ("bfloat16",) * 3 if storage == "bfloat16" else kinds
        names = dict(zip(("mu_dtype", "slow_dtype", "nu_dtype"), kinds, strict=True))
        rate = package.scale_by_learning_rate(0.01)
        return chain(package.scale_by_ademamix(**names), rate, package.round_stochastically(3))

    draws = np.random.default_rng(1).normal(size=(7, 16, 24)).astype(np.float32)
    assert_both_end_alike(make, draws)
