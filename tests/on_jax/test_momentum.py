"""Lion and momentum: their states, and how they stand with sharding and injected rates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, gradients, run, sharded, take_step, weights

SHAPE = (16, 24)
RECIPES = {
    "lion": functools.partial(hs.lion, 1e-3, mu_dtype="bfloat16", mu_rounding="stochastic", seed=3),
    "sgd": functools.partial(hs.sgd, 1e-3, 0.9, accumulator_dtype="float16", rounding="stochastic", seed=3),
    "scaled lion": functools.partial(hs.lion, 1e-3, mu_dtype=hs.scaled("int8", 8, 0, 0)),
    "plain sgd": functools.partial(hs.sgd, 1e-3, seed=3),
}


def test_a_momentum_of_zero_or_none_keeps_nothing():
    params = {"w": weights(8)}
    for momentum in (None, 0, 0.0):
        assert optax.tree.get(hs.sgd(1e-3, momentum).init(params), "trace") is None
    assert optax.tree.get(hs.sgd(1e-3, 0.5).init(params), "trace") is not None


@pytest.mark.slow
@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
def test_sharded_steps_give_the_bits_of_one_device_and_send_nothing(make):
    tx = make()
    params, rows = {"w": sharded(weights(SHAPE), "x", None)}, gradients(3, SHAPE)
    state = tx.init(params)
    step = jax.jit(functools.partial(take_step, tx))
    text = step.lower(params, state, {"w": sharded(rows[0], "x", None)}).compile().as_text()
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all", "permute(") if name in text]
    for g in rows:
        params, state = step(params, state, {"w": sharded(g, "x", None)})
    assert_trees_same((params, state), run(tx, {"w": weights(SHAPE)}, {"w": rows}))


def test_the_states_are_int32_counts_raw_seed_words_and_codes():
    lion = hs.lion(1e-3, seed=2**32 + 7).init({"w": weights(3)})[0]
    assert lion._fields == ("count", "seed", "mu", "mu_scale")
    trace = hs.sgd(1e-3, 0.9, seed=2**32 + 7).init({"w": weights(3)})[0]
    assert trace._fields == ("count", "seed", "trace", "trace_scale")
    for state in (lion, trace):
        assert (state.count.dtype, int(state.count), state.seed.tolist()) == (jnp.int32, 0, [1, 7])
    assert lion.mu["w"].dtype == trace.trace["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(hs.lion, b2=0.9, mu_rounding="nearest"),
        functools.partial(hs.sgd, rounding="nearest"),
    ],
    ids=["lion", "sgd"],
)
def test_injected_rates_give_the_bits_of_constants(make):
    options = {"momentum": 0.75} if make.func is hs.sgd else {"b1": 0.75}
    injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-3, **options)
    params, rows = {"w": weights(40)}, {"w": gradients(3, 40)}
    plain, _ = run(make(1e-3, **options), params, rows)
    assert_trees_same(run(injected, params, rows)[0], plain)


def test_an_average_that_drops_is_followed_down_by_auto():
    """Nearest in bfloat16 would stay up at b2 = 0.999; "auto" is stochastic there."""
    tx = hs.scale_by_lion(b2=0.999, mu_dtype="bfloat16")
    state = tx.init(jnp.zeros(2000))._replace(mu=jnp.ones(2000, jnp.bfloat16))

    def step(state, _):
        return tx.update(jnp.zeros(2000), state)[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, None, 500))(state)
    # Each rounding has variance at most gap times step, 2^-7 * 2^-10: five sigmas of the mean of 2,000.
    error = 5 * np.sqrt(500 * 2.0**-17 / 2000)
    assert abs(float(state.mu.astype(jnp.float32).mean()) - 0.999**500) < error
