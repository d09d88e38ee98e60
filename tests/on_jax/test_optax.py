"""Our links behave as Optax's own do, by the list of Optax's tests for its optimizers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from halfstep_jax.numbers import seeds
from on_jax.steps import DTYPES, assert_trees_same, gradients, run, take_step, weights

ALIASES = {
    "adam": hs.adam,
    "adamw": hs.adamw,
    "nadamw": functools.partial(hs.adamw, nesterov=True),
    "lion": hs.lion,
    "sgd": functools.partial(hs.sgd, momentum=0.9),
}
LINKS = {
    "scale_by_adam": hs.scale_by_adam,
    "scale_by_lion": hs.scale_by_lion,
    "trace": functools.partial(hs.trace, 0.9),
    "add_decayed_weights": functools.partial(hs.add_decayed_weights, 0.1),
    "scale_by_learning_rate": functools.partial(hs.scale_by_learning_rate, 0.1),
    "round_stochastically": hs.round_stochastically,
}


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@pytest.mark.slow
@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
def test_bfloat16_weights_find_the_minimum_of_a_parabola(make):
    """Rounded to nearest they would stop where a step is under half a gap."""
    goal, start = jnp.array([0.5, -1.0, 2.0]), jnp.zeros(3, jnp.bfloat16)
    tx = make(optax.cosine_decay_schedule(0.1, 200))

    def step(carry, _):
        return take_step(tx, *carry, 2 * (carry[0].astype(jnp.float32) - goal)), None

    (params, _), _ = jax.jit(lambda s: jax.lax.scan(step, s, None, 200))((start, tx.init(start)))
    # Two gaps of bfloat16 around 2.
    np.testing.assert_allclose(params.astype(jnp.float32), goal, atol=2 * 2.0**-7)


@pytest.mark.slow
@pytest.mark.parametrize("make", [hs.adam, hs.adamw])
def test_multi_steps_takes_one_step_with_the_mean_gradient(make):
    params, rows = {"w": weights(40)}, gradients(6, 40)
    tx = make(1e-3)
    multi = optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation()
    after, state = run(multi, params, {"w": rows})
    # The running mean of two, as MultiSteps forms it.
    means = {"w": jnp.stack([a + (b - a) / 2 for a, b in zip(rows[::2], rows[1::2], strict=True)])}
    assert_trees_same(after, run(tx, params, means)[0])
    assert int(optax.tree.get(state.inner_opt_state[0], "count")) == 3


@pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_link_emits_float32_updates_of_the_same_tree(make, dtype):
    tx = make()
    params = {"w": weights((3, 2), dtype), "b": [weights((), dtype), None]}
    updates, state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert {str(u.dtype) for u in jax.tree.leaves(updates)} == {"float32"}
    assert [u.shape for u in jax.tree.leaves(updates)] == [p.shape for p in jax.tree.leaves(params)]
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, params))


@pytest.mark.slow
def test_seeds_go_by_integer_words_and_arrays():
    g, params = {"w": gradients(1, 50)[0]}, {"w": weights(50)}
    seeds = (
        7,
        np.int64(7),
        np.array([0, 7], np.uint32),
        jnp.array([0, 7], jnp.uint32),
        jnp.int32(7),
        np.uint64(7),
    )
    make = functools.partial(hs.adamw, 1e-2)
    results = [make(seed=s).update(g, make(seed=s).init(params), params) for s in seeds]
    for result in results[1:]:
        assert_trees_same(result, results[0])
    traced = jax.jit(lambda s: make(seed=s).update(g, make(seed=s).init(params), params))
    assert_trees_same(traced(jnp.uint32(7)), results[0])
    assert_trees_same(traced(jnp.array([0, 7], jnp.uint32)), results[0])


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_a_traced_seed_keeps_both_its_words(dtype):
    with jax.enable_x64(True):
        init = lambda seed: hs.round_stochastically(seed=seed).init({"w": jnp.ones(2)}).seed  # noqa: E731
        for seed in (2**33 + 5, 7):
            due = divmod(seed, 2**32)
            assert tuple(jax.jit(init)(jnp.asarray(seed, dtype)).tolist()) == due
            assert tuple(init(jnp.asarray(seed, dtype)).tolist()) == due


MAPPED = {
    "adamw": (lambda seed: hs.adamw(1e-2, seed=seed), "bfloat16", 1),
    "a sum": (lambda seed: hs.accumulate_gradients(optax.sgd(0.1), 2, seed=seed), "bfloat16", 1),
    "a stored state": (lambda seed: hs.store_state(optax.trace(0.9), "bfloat16", seed=seed), "float32", 1),
    "float32": (lambda seed: hs.adamw(1e-2, seed=seed), "float32", 0),
}


@pytest.mark.parametrize("name", MAPPED)
def test_members_of_a_vmap_with_one_seed_are_warned_of_once(name, caplog):
    make, dtype, warnings = MAPPED[name]
    params = {"w": jnp.ones((3, 4), dtype)}
    seeds._warn_of_equal_seeds.cache_clear()
    keys = jax.random.split(jax.random.key(0), 3)
    own = jax.vmap(lambda p, seed: make(seed).init(p))(params, keys)
    make(0).init(params)
    assert not caplog.records
    name = "outer_seed" if hasattr(own, "outer_seed") else "seed"
    assert len(np.unique(np.asarray(optax.tree.get_all_with_path(own, name)[0][1]), axis=0)) == 3
    for _ in range(2):
        jax.jit(jax.vmap(make(0).init))(params)
    assert len(caplog.records) == warnings
    assert all("Give each member its own seed" in x.message for x in caplog.records)


@pytest.mark.slow
def test_vmap_over_seeds_and_params_is_one_run_each():
    rows = gradients(2, 30)
    params = jnp.stack([weights(30, seed=k) for k in range(3)])
    words = jnp.array([[0, 1], [2, 0], [0, 3]], jnp.uint32)

    def two_steps(p, seed):
        return run(hs.adamw(1e-2, seed=seed), {"w": p}, {"w": rows})

    together = jax.jit(jax.vmap(two_steps))(params, words)
    for k in range(3):
        alone = run(hs.adamw(1e-2, seed=words[k]), {"w": params[k]}, {"w": rows})
        assert_trees_same(jax.tree.map(lambda x, k=k: x[k], together), alone)


@pytest.mark.slow
def test_apply_if_finite_goes_around_the_links_before_ours():
    # lax.cond wants updates in the dtype of the gradients, and ours are float32: with bfloat16 gradients it
    # may hold anything that keeps their dtype, and our links follow.
    tx = optax.chain(optax.apply_if_finite(optax.clip(1.0), max_consecutive_errors=3), hs.adamw(1e-3))
    params, rows = {"w": weights(20)}, gradients(3, 20, "bfloat16").at[1, 4].set(jnp.nan)
    params, state = run(tx, params, {"w": rows})
    assert bool(jnp.isfinite(params["w"]).all())
    assert int(state[0].total_notfinite) == 1
    # Float32 gradients may pass through the whole.
    wrapped = optax.apply_if_finite(hs.adamw(1e-3), max_consecutive_errors=3)
    params, state = run(wrapped, {"w": weights(20)}, {"w": rows.astype(jnp.float32)})
    assert bool(jnp.isfinite(params["w"]).all())
    with pytest.raises(TypeError, match="float32"):
        run(wrapped, {"w": weights(20)}, {"w": rows})


@pytest.mark.slow
def test_x64_changes_nothing():
    params, rows = {"w": weights(30)}, {"w": gradients(3, 30)}
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    tx = hs.adamw(schedule, weight_decay=0.1)
    expected = run(tx, params, rows)[1][0]
    with jax.enable_x64(True):
        wide = run(tx, params, rows)
        assert shapes(wide) == shapes((params, tx.init(params)))
        assert_trees_same(wide[1][0], expected)


@pytest.mark.parametrize("rate", [np.asarray, jnp.asarray])
def test_a_float64_scalar_is_the_number_of_python_in_float32(rate):
    p = {"w": weights(30, "float32")}
    with jax.enable_x64(True):
        tx = hs.sgd(rate(0.1))
        assert rate(0.1).dtype == jnp.float64
        updates, _ = jax.jit(tx.update)(p, tx.init(p), p)
        same = jax.jit(lambda rate: hs.sgd(rate).update(p, tx.init(p), p)[0])(rate(0.1))
    expected = hs.sgd(0.1).update(p, tx.init(p), p)[0]
    assert_trees_same(updates, expected)
    assert_trees_same(same, expected)


@pytest.mark.slow
@pytest.mark.parametrize("param_storage", ["stochastic", "split16", "master", "compensated"])
def test_float64_weights_are_stepped_in_float32_and_keep_what_they_are(param_storage):
    tx = hs.adamw(1e-3, param_storage=param_storage)
    with jax.enable_x64(True):
        wide = 1 + 2.0**-40 * jnp.arange(30, dtype=jnp.float64)
        params = {"w": weights(30), "wide": wide}
        narrow = params | {"wide": wide.astype(jnp.float32)}
        g = {"w": gradients(1, 30)[0], "wide": jnp.linspace(-1, 1, 30, dtype=jnp.float64)}
        state = tx.init(params)
        assert_trees_same(state, tx.init(narrow))
        for update in (tx.update, jax.jit(tx.update)):
            updates, after = update(g, state, params)
            narrow_g = g | {"wide": g["wide"].astype(jnp.float32)}
            in_float32 = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
            assert_trees_same((in_float32, after), update(narrow_g, state, narrow))
            new = optax.apply_updates(params, updates)["wide"]
            assert new.dtype == jnp.float64
            assert new.tolist() == (wide + updates["wide"]).tolist()


OF_FLOAT64 = {
    "adamw": lambda: hs.adamw(1e-2),
    "nearest": lambda: hs.adamw(1e-2, param_storage="nearest"),
    "feedback": lambda: hs.adamw(1e-2, **hs.recipes.one_pass),
    # Optax computes in the dtype of the gradients.
    "split16": lambda: hs.store_params(optax.sgd(1e-2), "split16"),
    "split16 of float32 updates": lambda: hs.store_params(hs.scale_by_adam(), "split16"),
    "lamb": lambda: hs.lamb(1e-2),
    "sgd": lambda: hs.sgd(1e-2),
    "accumulated": lambda: hs.accumulate_gradients(optax.sgd(1e-2), 2),
    "skipped": lambda: hs.skip_nonfinite(hs.adamw(1e-2)),
    "left out": lambda: optax.apply_if_finite(hs.adamw(1e-2), 3),
}


@pytest.mark.parametrize("name", OF_FLOAT64)
def test_updates_of_float64_gradients_are_float64_with_the_values_of_float32(name):
    tx = OF_FLOAT64[name]()
    step = jax.jit(lambda tree: tx.update(tree, tx.init(tree), tree)[0])
    with jax.enable_x64(True):
        wide = {"w": jnp.linspace(0.5, 1, 6).reshape(2, 3), "b": jnp.ones(3, jnp.float32), "n": None}
        narrow = {"w": wide["w"].astype(jnp.float32), "b": wide["b"], "n": None}
        us, due = step(wide), step(narrow)
        assert (us["w"].dtype, us["b"].dtype) == (jnp.float64, jnp.float32)
        np.testing.assert_allclose(us["w"], due["w"], rtol=0 if name != "split16" else 2**-22)
        # Weakly typed, as gpjax's: a float32 update would make float32 of it.
        new = jax.eval_shape(lambda weak: weak["w"] + step(weak)["w"], {"w": jnp.asarray(1.0)})
        assert new.dtype == jnp.float64


def test_last_links_return_float64_for_float64_weights_with_float32_gradients():
    with jax.enable_x64(True):
        params, g = {"w": jnp.ones(3)}, {"w": jnp.ones(3, jnp.float32)}
        for storage in ("stochastic", "split16", "master", "compensated"):
            tx = hs.adamw(1e-2, param_storage=storage)
            updates, _ = jax.eval_shape(lambda p, tx=tx: tx.update(g, tx.init(p), p), params)
            assert updates["w"].dtype == jnp.float64, storage


def test_what_lies_inside_sees_float64_weights_in_float32():
    seen = []
    inner = optax.stateless(lambda updates, params: (seen.append(params["w"].dtype), updates)[1])
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float64)}
        tx = hs.split_params(inner)
        tx.update(params, tx.init(params), params)
    assert seen == [jnp.float32]


@pytest.mark.slow
def test_implicit_promotion_and_debug_flags_find_nothing():
    params, rows = {"w": weights(30)}, {"w": gradients(2, 30)}
    with jax.numpy_dtype_promotion("strict"), jax.checking_leaks(), jax.numpy_rank_promotion("raise"):
        tx = hs.adamw(1e-3, eps_root=1e-6, nesterov=True)
        state = tx.init(params)
        updates, _ = jax.jit(tx.update)({"w": rows["w"][0]}, state, params)
        hs.apply_updates(params, updates, 0, 1)
    with jax.debug_nans(True):
        run(hs.adamw(1e-3), params, rows)


@pytest.mark.parametrize("recipe", [{}, {"recipe": "eight_bit"}, {"param_storage": "feedback"}])
def test_float32_weights_are_stepped_without_params_as_the_error_says(recipe):
    """As brax and dynamax call `update`."""
    params = {"w": jnp.linspace(-1.0, 1.0, 8)}
    tx = hs.adam(1e-3, **recipe)
    with pytest.raises(ValueError, match=r'params is None; .*float32 weights with param_storage="nearest"'):
        tx.update(params, tx.init(params))
    tx = hs.adam(1e-3, **{**recipe, "param_storage": "nearest"})
    due, _ = tx.update(params, tx.init(params), params)
    updates, _ = tx.update(params, tx.init(params))
    assert (updates["w"] == due["w"]).all()
