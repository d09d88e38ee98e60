"""Gradients of micro-batches, added up in 16 bits, and steps by their mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs


def rows(count: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.uniform(0.01, 0.11, (count, size)).astype(np.float32)


def test_sums_of_64_gradients_are_unbiased_where_plain_sums_lose_some():
    tx, gs = hs.accumulate_gradients(optax.identity(), 64), jnp.asarray(rows(64, 4000), jnp.bfloat16)
    gs = gs.at[0].set(64.0)
    exact = np.asarray(gs, np.float64).mean(0)

    @jax.jit
    def run(state):
        return jax.lax.scan(lambda state, g: tx.update(g, state)[::-1], state, gs)

    state, updates = run(tx.init(gs[0]))
    error = (np.asarray(updates[-1], np.float64) / exact - 1).mean()
    # 63 roundings to a gap of 2^-7 of the sum, each with a deviation of at most half of it.
    assert abs(error) < 5 * 2**-8 * 63**0.5 / 4000**0.5
    plain = jax.lax.scan(lambda total, g: (total + g, None), jnp.zeros_like(gs[0]), gs)[0]
    assert (np.asarray(plain, np.float64) / 64 / exact - 1).mean() < -0.03
    assert state.mini_step == 0
    assert state.acc_grads.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_between_steps_nothing_moves_and_the_inner_state_stays(dtype):
    params = {"w": jnp.asarray([-0.0, 1.0, -2.0], jnp.bfloat16), "none": None}
    grads = {"w": jnp.asarray([1.0, 0.5, -0.25], dtype), "none": None}
    inner = hs.adamw(1e-2)
    tx = hs.accumulate_gradients(inner, 3)
    state = first = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
        assert optax.apply_updates(params, updates)["w"].view(jnp.uint16).tolist() == [0x8000, 0x3F80, 0xC000]
        assert jax.tree.all(jax.tree.map(jnp.array_equal, state.inner_state, first.inner_state))
    updates, state = update(grads, state, params)
    # Sums and means of these are exact: the step is that of the gradient itself.
    wide = {"w": grads["w"].astype(jnp.float32), "none": None}
    alone, inner_state = jax.jit(inner.update)(wide, inner.init(params), params)
    np.testing.assert_allclose(updates["w"], alone["w"], rtol=1e-2, atol=1e-7)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state.inner_state[0].count, inner_state[0].count))
    assert state.acc_grads["w"].view(jnp.uint16).tolist() == [0x8000] * 3


def test_the_sum_takes_half_the_memory_of_optax():
    params = {"w": jnp.zeros((64, 64), jnp.bfloat16)}
    ours = hs.accumulate_gradients(optax.sgd(0.1), 4).init(params).acc_grads["w"]
    theirs = optax.MultiSteps(optax.sgd(0.1), 4).init(params).acc_grads["w"]
    assert 2 * ours.nbytes == theirs.nbytes


def test_a_single_micro_batch_is_a_step():
    tx, g = hs.accumulate_gradients(optax.sgd(1.0), every_k=1), {"w": jnp.full(4, 0.5, jnp.float32)}
    updates, _ = tx.update(g, tx.init(g), g)
    assert (np.asarray(updates["w"]) == -0.5).all()


@pytest.mark.slow
def test_eager_and_jitted_micro_batches_agree_to_the_bit():
    tx = hs.accumulate_gradients(optax.sgd(0.3), 3, seed=5)
    params = {"w": jnp.asarray(rows(1, 50)[0], jnp.bfloat16)}
    states = [tx.init(params)] * 2
    for g in rows(3, 50):
        steps = [
            f({"w": jnp.asarray(g)}, s, params)
            for f, s in zip((tx.update, jax.jit(tx.update)), states, strict=True)
        ]
        states = [state for _, state in steps]
        assert jax.tree.all(jax.tree.map(jnp.array_equal, *steps))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every_k": 0}, ValueError, "every_k=0 is below 1"),
        ({"every_k": 2.0}, TypeError, "every_k=2.0 is not an integer"),
        ({"every_k": 2, "dtype": "int8"}, ValueError, "dtype=int8 is not one that sums are kept in"),
        ({"every_k": 2, "dtype": "no"}, TypeError, "dtype='no' is not a dtype"),
    ],
)
def test_bad_arguments_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        hs.accumulate_gradients(optax.sgd(1.0), **options)


def test_a_state_of_another_dtype_is_refused():
    params = {"w": jnp.zeros(3, jnp.bfloat16)}
    state = hs.accumulate_gradients(optax.sgd(1.0), 2, "float32").init(params)
    with pytest.raises(ValueError, match="the sum of 'w' is float32"):
        hs.accumulate_gradients(optax.sgd(1.0), 2).update(params, state)


def test_an_average_of_bf16_weights_moves():
    """A hundred averages at 0.999 of a weight that went from 1 to 2, where a plain one stays at 1."""
    ema, p = hs.ema_params(0.999), jnp.full(4000, 2.0, jnp.bfloat16)
    update, state = jax.jit(ema.update), ema.init(jnp.ones(4000, jnp.bfloat16))
    plain = jnp.ones(4000, jnp.bfloat16)
    for _ in range(100):
        average, state = update(p, state)
        plain = optax.incremental_update(p, plain, 1e-3)
    assert (plain == 1).all()
    due = 2 - 0.999**100
    # 100 roundings to a gap of 2^-7: each with a deviation of at most sqrt(0.128 * 0.872) of it.
    assert abs(np.asarray(average, np.float64).mean() - due) < 5 * 2**-7 * (100 * 0.112 / 4000) ** 0.5
    with pytest.raises(ValueError, match="'' is float32, its average bfloat16"):
        ema.update(p.astype(jnp.float32), state)
