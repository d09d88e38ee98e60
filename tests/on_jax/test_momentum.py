"""Lion and momentum: a state that is left out, and steps over devices."""

import functools

import jax
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
