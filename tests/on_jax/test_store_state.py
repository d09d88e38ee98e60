"""`store_state` over Optax's own transforms: what it stores, what it leaves alone, and what that changes."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, gradients, run, sharded, take_step, weights

RATE = 1e-2


TRANSFORMS = {
    "adam": optax.adam(RATE),
    "adamw": optax.adamw(RATE),
    "amsgrad": optax.amsgrad(RATE),
    "adabelief": optax.adabelief(RATE),
    "adamax": optax.adamax(RATE),
    "lion": optax.lion(RATE),
    "nadam": optax.nadam(RATE),
    "novograd": optax.novograd(RATE),
    "radam": optax.radam(RATE),
    "rmsprop": optax.rmsprop(RATE),
    "yogi": optax.yogi(RATE),
    "sgd with momentum": optax.sgd(RATE, 0.9),
    "lamb": optax.lamb(RATE),
    "adagrad": optax.adagrad(RATE),
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(RATE),
    "prodigy": optax.contrib.prodigy(),
    "schedule_free": optax.contrib.schedule_free_adamw(RATE),
}


QUICK = ("adamw", "sgd with momentum", "novograd", "muon")
FP8 = hs.scaled("float8_e4m3fn", 8, 0, 1)


def slow_but(quick):
    return [
        pytest.param(name, id=name, marks=[] if name in quick else [pytest.mark.slow]) for name in TRANSFORMS
    ]


def problem(steps: int = 3):
    params = {
        "w": weights((8, 12), "float32"),
        "b": weights(12, "float32", seed=2),
        "s": weights((), "float32"),
    }
    rows = {"w": gradients(steps, (8, 12)), "b": gradients(steps, 12), "s": gradients(steps, ())}
    return params, rows


def arrays(state):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def stored(x):
    return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(QUICK))
def test_stored_in_float32_it_is_the_transform_itself(name):
    params, rows = problem(2)
    # Op by op: XLA fuses what is not ours differently in different programs.
    theirs, reference = run(TRANSFORMS[name], params, rows, compiled=False)
    ours, state = run(hs.store_state(TRANSFORMS[name], "float32"), params, rows, compiled=False)
    assert_trees_same(ours, theirs)
    assert_trees_same(state.inner_state, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(QUICK))
def test_every_array_with_an_axis_is_stored_and_all_else_left_alone(name):
    params, rows = problem()
    plain = TRANSFORMS[name].init(params)
    for fmt, dtype in (("bfloat16", jnp.bfloat16), (FP8, jnp.float8_e4m3fn)):
        after, state = run(hs.store_state(TRANSFORMS[name], fmt), params, rows)
        for before, now in zip(arrays(plain).items(), arrays(state.inner_state).items(), strict=True):
            assert now[0] == before[0]
            assert now[1].shape == before[1].shape, now[0]
            assert now[1].dtype == (dtype if stored(before[1]) else before[1].dtype), now[0]
        chex.assert_tree_all_finite(after)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("adamw",)))
def test_in_a_scan_it_takes_the_same_steps(name):
    params, rows = problem()
    tx = hs.store_state(TRANSFORMS[name], FP8)

    def step(carry, row):
        return take_step(tx, *carry, row), None

    scanned, _ = jax.jit(lambda start: jax.lax.scan(step, start, rows))((params, tx.init(params)))
    one_by_one = run(tx, params, rows)
    # What XLA fuses of others' arithmetic may differ from program to program, by units in the last place.
    # An update is at most a few rates; a code may then fall on the other side, by an eighth of it.
    chex.assert_trees_all_close(scanned[0], one_by_one[0], atol=0.2 * RATE)
    assert jax.tree.map(jnp.shape, scanned) == jax.tree.map(jnp.shape, one_by_one)


@pytest.mark.slow
def test_updates_are_of_the_state_before_it_was_stored():
    params, rows = problem(1)
    g = jax.tree.map(lambda r: r[0], rows)
    tx, inner = hs.store_state(optax.sgd(RATE, 0.9), FP8), optax.sgd(RATE, 0.9)
    ours, theirs = (
        jax.jit(tx.update)(g, tx.init(params), params)[0],
        jax.jit(inner.update)(g, inner.init(params), params)[0],
    )
    assert_trees_same(ours, theirs)


@pytest.mark.slow
def test_sharded_state_has_the_bits_of_one_device():
    tx = optax.chain(
        hs.store_state(hs.scale_by_adam(mu_dtype="float32", nu_dtype="float32"), FP8, seed=1),
        hs.scale_by_learning_rate(RATE),
    )
    params, rows = {"w": sharded(weights((16, 24)), "x", None)}, gradients(3, (16, 24))
    state = tx.init(params)
    assert state[0].inner_state.mu["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
    step = jax.jit(functools.partial(take_step, tx))
    for g in rows:
        params, state = step(params, state, {"w": sharded(g, "x", None)})
    assert_trees_same((params, state), run(tx, {"w": weights((16, 24))}, {"w": rows}))


def test_select_chooses_by_name_and_by_shape():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    by_name = hs.store_state(optax.adam(RATE), "bfloat16", select=lambda name, array: "nu" in name.split("/"))
    state = by_name.init(params).inner_state[0]
    assert (state.mu["w"].dtype, state.nu["w"].dtype) == (jnp.float32, jnp.bfloat16)
    by_shape = hs.store_state(optax.adam(RATE), "bfloat16", select=lambda name, array: len(array.shape) == 2)
    state = by_shape.init(params).inner_state[0]
    assert (state.mu["w"].dtype, state.mu["b"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_small_arrays_stay_as_they_were_made():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    state = hs.store_state(optax.adam(RATE, mu_dtype="bfloat16"), hs.scaled("int8")).init(params)
    mu = state.inner_state[0].mu
    assert (mu["w"].dtype, mu["b"].dtype) == (jnp.int8, jnp.bfloat16)
    assert {name: x.shape for name, x in state.scale.items()} == {"0/mu/w": (32,), "0/nu/w": (32,)}


@pytest.mark.slow
def test_wrapped_in_multi_steps_and_masked_it_keeps_its_dtypes():
    params, rows = problem(4)
    for wrap in (
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        lambda tx: optax.masked(tx, {"w": True, "b": False, "s": True}),
        lambda tx: optax.partition({"a": tx, "b": optax.sgd(RATE)}, {"w": "a", "b": "b", "s": "a"}),
    ):
        for fmt in ("bfloat16", FP8):
            tx = wrap(hs.store_state(optax.adam(RATE), fmt))
            after, state = run(tx, params, rows)
            chex.assert_tree_all_finite(after)
            same = jax.tree.map(
                lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state, tx.init(params)
            )
            assert all(jax.tree.leaves(same))


def test_it_may_wrap_what_masks_and_partitions():
    params, rows = problem()
    inner = optax.masked(optax.adam(RATE), {"w": True, "b": False, "s": True})
    after, state = run(hs.store_state(inner, "bfloat16"), params, rows)
    chex.assert_tree_all_finite(after)
    assert optax.tree.get(state, "mu")["w"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_optax_s_tree_tools_find_and_map_its_arrays():
    params, _ = problem()
    tx = hs.store_state(optax.adamw(RATE), FP8)
    state = tx.init(params)
    assert optax.tree.get(state, "nu")["w"].dtype == jnp.float8_e4m3fn
    shapes = optax.tree.map_params(tx, lambda x: x.shape, state, transform_non_params=lambda x: None)
    assert shapes.inner_state[0].mu["w"] == (8, 12)
    assert shapes.scale is None
    assert state.scale["0/mu/w"].shape == (8, 2)
    shapes = jax.eval_shape(tx.init, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


@pytest.mark.slow
def test_keys_and_numbers_of_python_are_left_alone():
    def update(updates, state, params=None):
        return updates, {**state, "key": jax.random.split(state["key"])[0]}

    def init(params):
        return {"key": jax.random.key(1), "raw": jax.random.PRNGKey(2), "number": 0.5, "mu": params}

    tx = hs.store_state(optax.GradientTransformation(init, update), "bfloat16")
    params, rows = problem(2)
    _, state = run(tx, params, rows, compiled=False)
    assert (state.inner_state["number"], state.inner_state["raw"].tolist()) == (0.5, [0, 2])
    expected = jax.random.split(jax.random.split(jax.random.key(1))[0])[0]
    assert state.inner_state["key"] == expected
    assert state.inner_state["mu"]["w"].dtype == jnp.bfloat16
    noisy = run(hs.store_state(optax.add_noise(0.1, 0.5, jax.random.key(0)), "bfloat16"), params, rows)
    assert_trees_same(noisy[0], run(optax.add_noise(0.1, 0.5, jax.random.key(0)), params, rows)[0])


def test_params_may_be_left_out():
    params, rows = problem(1)
    tx, g = hs.store_state(optax.scale_by_adam(), FP8), jax.tree.map(lambda r: r[0], rows)
    state = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(lambda g, state: tx.update(g, state), g, state)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_extra_arguments_reach_the_transform():
    params, rows = problem(1)
    inner = optax.scale_by_polyak()
    tx, g = hs.store_state(inner, "bfloat16"), jax.tree.map(lambda r: r[0], rows)
    ours, _ = tx.update(g, tx.init(params), params, value=jnp.float32(2.0))
    theirs, _ = inner.update(g, inner.init(params), params, value=jnp.float32(2.0))
    assert_trees_same(ours, theirs)
