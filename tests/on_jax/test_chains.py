"""What may stand before, after and around what stores the weights, and what happens where it may not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from halfstep_jax import link_reports
from on_jax.steps import assert_trees_same, gradients, run, take_step, weights

P = {"w": weights((8, 8)), "b": weights((5,), "float32")}
G = {"w": gradients(3, (8, 8)), "b": gradients(3, (5,), seed=2)}


# --- weights that were written between two steps -----------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    ["master", *(pytest.param(r, marks=pytest.mark.slow) for r in ("stochastic", "compensated", "split8"))],
)
def test_a_step_goes_on_from_a_weight_that_was_written(rule):
    """After the write a step of 2^-10 starts at 5, not at what was kept of weights near 0.05."""
    tx = hs.store_params(optax.scale(-1.0), rule)
    params, state = run(tx, P, G)
    params = {**params, "w": params["w"].at[1].set(5.0)}
    params, state = take_step(tx, params, state, jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-10), P))
    known = hs.float32_params(params, state)["w"][1]
    # Low bits of another weight are worth half a gap, 2^-6, at most; stochastic rounding is off by a gap.
    bound = {"master": 0, "stochastic": 2.0**-5}.get(rule, 2.0**-6)
    assert (jnp.abs(known - (5 - 2.0**-10)) <= bound).all()


def test_a_master_copy_is_dropped_where_the_weight_was_written_and_kept_elsewhere():
    tx = hs.store_params(optax.scale(-1.0), "master")
    params, state = run(tx, P, G)
    before = state.master["w"]
    written = {**params, "w": params["w"].at[0, 0].set(1.0)}
    known = hs.float32_params(written, state)["w"]
    assert known[0, 0] == 1
    np.testing.assert_array_equal(np.asarray(known).ravel()[1:], np.asarray(before).ravel()[1:])
    zeros = jax.tree.map(jnp.zeros_like, P)
    _, state = take_step(tx, written, state, zeros)
    np.testing.assert_array_equal(state.master["w"], known)


# --- a chain of Optax, which nothing checks ----------------------------------------------------------------

GOES_ON = {
    "chain": lambda: optax.chain(hs.sgd(1e-3), optax.scale(0.5)),
    "nested": lambda: optax.chain(optax.chain(optax.clip(1.0), hs.sgd(1e-3)), optax.scale(0.5)),
    "feedback": lambda: optax.chain(hs.adamw(1e-3, param_storage="feedback"), optax.scale(0.5)),
    "split8": lambda: optax.chain(hs.sgd(1e-3, param_storage="split8"), optax.scale(0.5)),
    "lookahead": lambda: optax.lookahead(hs.sgd(1e-3), 5, 0.5),
}
ENDS = {
    "last": lambda: optax.chain(optax.clip(1.0), hs.sgd(1e-3)),
    "inside": lambda: hs.store_params(optax.chain(hs.sgd(1e-3, param_storage="nearest"), optax.scale(0.5))),
    "MultiSteps": lambda: optax.MultiSteps(hs.sgd(1e-3), 2),
    "checked": lambda: hs.chain(hs.sgd(1e-3), optax.zero_nans()),
    "lookahead": lambda: hs.store_params(optax.lookahead(hs.sgd(1e-3, param_storage="nearest"), 5, 0.5)),
}


def logged_at_init(tx, name, caplog):
    link_reports._say_once.cache_clear()
    for _ in range(2):
        tx.init(optax.LookaheadParams.init_synced(P) if name == "lookahead" else P)
    return [r.getMessage() for r in caplog.records if r.name == "halfstep_jax"]


@pytest.mark.parametrize("name", GOES_ON)
def test_a_chain_that_goes_on_unchecked_is_logged_once(name, caplog):
    around = "optax.lookahead" if name == "lookahead" else "optax.chain"
    (line,) = logged_at_init(GOES_ON[name](), name, caplog)
    assert f"{around} goes on behind the link that stores weights" in line
    assert line.endswith("Use halfstep_jax.chain, or call check_chain(tx, params).")


@pytest.mark.parametrize("name", ENDS)
def test_nothing_is_logged_of_a_chain_that_ends_as_it_should(name, caplog):
    assert not logged_at_init(ENDS[name](), name, caplog)


# --- a NaN that is skipped, and kept -----------------------------------------------------------------------


def skipped(tx):
    return optax.apply_if_finite(tx, 1000)


F32 = {"w": weights(6, "float32")}
KEEP_NAN = {
    "MultiSteps": (lambda: optax.MultiSteps(hs.skip_nonfinite(hs.adamw(1e-3)), 3), P),
    "MultiSteps, Optax": (lambda: optax.MultiSteps(skipped(optax.adamw(1e-3)), 20), F32),
    "trace": (lambda: optax.chain(optax.trace(0.9), hs.skip_nonfinite(hs.adamw(1e-3))), P),
}
DROP_NAN = {
    "outside": (lambda: hs.skip_nonfinite(optax.MultiSteps(hs.adamw(1e-3), 3).gradient_transformation()), P),
    "should_skip": (
        lambda: optax.MultiSteps(hs.skip_nonfinite(hs.adamw(1e-3)), 3, True, optax.skip_not_finite),
        P,
    ),
    "ours": (lambda: hs.accumulate_gradients(hs.skip_nonfinite(hs.adamw(1e-3)), 3), P),
    "alone": (lambda: hs.skip_nonfinite(hs.adamw(1e-3)), P),
    "Optax": (lambda: skipped(optax.adamw(1e-3)), F32),
}


@pytest.mark.parametrize("name", KEEP_NAN)
def test_a_nan_that_ends_training_is_found(name):
    make, params = KEEP_NAN[name]
    with pytest.raises(
        ValueError, match=r"check_chain: after one NaN .* no weight moves again: .* Skip outside"
    ):
        hs.check_chain(make(), params)
    assert (
        "after one NaN"
        in hs.diagnose(make(), params, jax.tree.map(lambda p: jnp.ones(p.shape), params)).advice[0]
    )


@pytest.mark.parametrize("name", DROP_NAN)
def test_a_nan_that_is_skipped_once_is_allowed(name):
    make, params = DROP_NAN[name]
    hs.check_chain(make(), params)


# --- where a link may stand --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["stochastic", "split8", "master"])
def test_a_factor_inside_is_a_smaller_learning_rate(rule):
    """Scaled by a power of two inside, the links give the bits of a smaller rate."""
    tx = hs.store_params(optax.chain(hs.sgd(2e-3, param_storage="nearest"), optax.scale(0.5)), rule)
    assert_trees_same(run(tx, P, G)[0], run(hs.sgd(1e-3, param_storage=rule), P, G)[0], rule)


@pytest.mark.slow
def test_a_plateau_halves_the_rate_inside_and_weights_go_on_moving():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = hs.store_params(optax.chain(hs.sgd(2.0**-12, param_storage="nearest"), plateau), "split16")
    params = {"w": jnp.ones(64, jnp.bfloat16)}
    state = tx.init(params)
    step = jax.jit(functools.partial(take_step, tx))
    due = 0.0
    for _ in range(6):
        params, state = step(params, state, {"w": jnp.ones(64)}, value=jnp.float32(1.0))
        due += 2.0**-12 * float(optax.tree.get(state, "scale"))
    assert float(optax.tree.get(state, "scale")) < 0.5
    # Sums of a few powers of two: float32 holds them.
    assert (1 - hs.float32_params(params, state)["w"] == due).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["stochastic", "split16"])
def test_a_chain_that_ends_as_it_should_is_accepted(rule):
    tx = hs.store_params(hs.sgd(1e-3, param_storage="nearest"), rule)
    for good in (
        tx,
        hs.sgd(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100), param_storage=rule),
        optax.MultiSteps(tx, 3).gradient_transformation(),
        optax.chain(hs.clip_by_global_norm(1.0), tx, optax.zero_nans()),
        optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        hs.skip_nonfinite(tx),
    ):
        hs.check_chain(good, P)
    hs.check_chain(tx, jax.eval_shape(lambda: {"w": jnp.zeros((100_000, 100_000), jnp.bfloat16)}))


def test_float32_weights_need_no_storage():
    hs.check_chain(optax.adamw(1e-3), {"w": weights(4, "float32")})


AFTER = {
    "scale": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau(factor=0.5)),
    "ema": lambda tx: optax.chain(hs.clip_by_global_norm(1.0), optax.chain(tx, optax.ema(0.9))),
    "clip_by_block_rms": lambda tx: optax.chain(tx, optax.zero_nans(), optax.clip_by_block_rms(1e-3)),
    "scale_by_learning_rate": lambda tx: optax.chain(tx, hs.scale_by_learning_rate(1.0)),
    "scale_by_adam": lambda tx: optax.chain(tx, optax.adamw(1e-3)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "reduce_on_plateau" else pytest.mark.slow) for name in AFTER],
)
def test_the_link_that_undoes_the_rounding_is_named(name):
    with pytest.raises(ValueError, match="check_chain: ") as caught:
        hs.check_chain(AFTER[name](hs.sgd(1e-3)), P, value=1.0)
    assert str(caught.value) == (
        f"check_chain: {name} changes the updates that round_stochastically applies to 'w', so they are "
        'rounded again and lost. Put it before: store_params(optax.chain(..., param_storage="nearest" in an '
        'alias, ...), "stochastic").'
    )


MOVERS = {
    "schedule_free": (lambda tx: optax.contrib.schedule_free(tx, 1e-3), "averages weights", "split16"),
    "lookahead": (
        lambda tx: optax.lookahead(tx, 5, 0.5),
        "moves weights between a fast and a slow copy",
        "stochastic",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param("schedule_free", marks=pytest.mark.slow), "lookahead"], ids=str
)
def test_what_moves_weights_itself_is_named_with_the_way_that_works(name):
    wrap, does, storage = MOVERS[name]
    with pytest.raises(
        ValueError, match=f"check_chain: {name} {does}. It changes the updates that"
    ) as caught:
        hs.check_chain(wrap(hs.sgd(1e-3)), P)
    assert str(caught.value).endswith(
        f'store_params({name}(..., param_storage="nearest" in its alias, ...), "{storage}").'
    )
    hs.check_chain(hs.store_params(wrap(hs.sgd(1e-3, param_storage="nearest")), storage), P)


def averages_of(tx):
    """Return a wrapper of a user's own: at every tenth step weights become their average, as in SWA."""

    def init(params):
        return tx.init(params), params, jnp.zeros([], jnp.int32)

    def update(updates, state, params):
        updates, inner = tx.update(updates, state[0], params)
        count, fast = state[2] + 1, jax.tree.map(jnp.add, params, updates)
        average = jax.tree.map(lambda a, f: a + (f - a) / (count + 1), state[1], fast)
        after = jax.tree.map(lambda a, f: jnp.where(count % 10 == 0, a, f), average, fast)
        return jax.tree.map(jnp.subtract, after, params), (inner, average, count)

    return optax.GradientTransformation(init, update)


def test_a_wrapper_of_a_user_s_own_that_moves_weights_is_named_with_the_way_that_works():
    p = {"w": weights((8, 8))}
    with pytest.raises(ValueError, match="check_chain: averages_of wraps what stores the weights") as caught:
        hs.check_chain(averages_of(hs.sgd(1e-3)), p)
    way = 'store_params(averages_of(..., param_storage="nearest" in its alias, ...), "split16").'
    assert str(caught.value).endswith(way)
    assert way in hs.diagnose(averages_of(hs.sgd(1e-3)), p, p).advice[0]
    hs.check_chain(hs.store_params(averages_of(hs.sgd(1e-3, param_storage="nearest")), "split16"), p)


def test_a_schedule_behind_feedback_is_to_be_given_to_the_rate():
    tx = hs.chain(hs.adamw(1e-3, param_storage="feedback"), optax.scale_by_schedule(lambda count: 0.5))
    with pytest.raises(
        ValueError, match=r"Give a schedule to learning_rate\. Or give up feedback: store_params"
    ):
        tx.init({"w": P["w"]})


def test_an_alias_behind_another_is_named_by_its_link():
    with pytest.raises(ValueError, match="check_chain: scale_by_learning_rate changes the updates"):
        hs.check_chain(optax.chain(hs.sgd(1e-3), hs.sgd(1e-3, param_storage="nearest")), P)


@pytest.mark.parametrize("before", [[], pytest.param([optax.clip(1.0)], marks=pytest.mark.slow)])
def test_lookahead_is_found_however_seldom_it_moves_weights(before):
    tx = optax.chain(*before, optax.lookahead(hs.sgd(1e-3), 40, 0.5))
    with pytest.raises(ValueError, match="lookahead moves weights between a fast and a slow copy"):
        hs.check_chain(tx, P)


def test_lookahead_over_what_stores_both_copies_moves_as_far_as_in_float32():
    tx = hs.store_params(optax.lookahead(hs.adam(1e-4, param_storage="nearest"), 5, 0.5))
    copies = optax.LookaheadParams.init_synced({"w": jnp.ones(4096, jnp.bfloat16)})
    step, params, state = jax.jit(functools.partial(take_step, tx)), copies, tx.init(copies)
    for _ in range(40):
        params, state = step(params, state, {"w": jnp.ones(4096)})
    # 8 syncs of half of 5 steps of 1e-4. Each rounds by chance to a gap of 2^-8, so that the mean of 4096 has
    # a deviation below sqrt(2e-3 * 2^-8 / 4096), 5e-5.
    assert float(1 - params.slow["w"].astype(jnp.float32).mean()) == pytest.approx(2e-3, abs=2e-4)


@pytest.mark.parametrize(
    "rule",
    ["split16", *(pytest.param(r, marks=pytest.mark.slow) for r in ("split8", "master"))],
)
def test_lookahead_over_further_bits_of_both_copies_goes_where_it_goes_in_float32(rule):
    tx = hs.store_params(optax.lookahead(hs.adam(1e-4, param_storage="nearest"), 2, 0.5), rule)
    plain, ends = optax.lookahead(optax.adam(1e-4), 2, 0.5), []
    for each, dtype in ((tx, "bfloat16"), (plain, "float32")):
        params = optax.LookaheadParams.init_synced({"w": jnp.ones(64, dtype)})
        state, step = each.init(params), jax.jit(functools.partial(take_step, each))
        for _ in range(4):
            params, state = step(params, state, {"w": jnp.ones(64)})
        ends.append(hs.float32_params(params, state) if dtype == "bfloat16" else params)
    # Adam's root and quotient differ by ulps of a step; 8 further bits are 2^-17 of a weight.
    np.testing.assert_allclose(ends[0].slow["w"], ends[1].slow["w"], atol=4 * 2.0**-17)
    np.testing.assert_allclose(ends[0].fast["w"], ends[1].fast["w"], atol=4 * 2.0**-17)


def test_a_chain_of_ours_is_checked_by_init_and_steps_as_that_of_optax():
    links = hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3), hs.round_stochastically()
    assert_trees_same(run(hs.chain(*links), P, G), run(optax.chain(*links), P, G))
    with pytest.raises(ValueError, match="check_chain: scale changes the updates"):
        hs.chain(hs.chain(*links), optax.scale(0.5)).init(P)
    with pytest.raises(ValueError, match="check_chain: no link stores 'w'"):
        jax.eval_shape(hs.chain(*links[:2]).init, P)
    plateau = optax.contrib.reduce_on_plateau(factor=0.5)
    with pytest.raises(ValueError, match="check_chain: reduce_on_plateau changes the updates"):
        hs.chain(*links, plateau, value=1.0).init(P)
    with pytest.raises(
        TypeError, match=r"update of this chain wants 'value' by name.* chain\(\.\.\., value=1\.0\)"
    ):
        hs.chain(plateau, *links).init(P)
    with pytest.raises(ValueError, match=r"chain: there are no links\. Pass transforms, such as chain\("):
        hs.chain()


@pytest.mark.parametrize(
    "tx", [optax.adamw(1e-3), hs.sgd(1e-3, param_storage="nearest")], ids=["optax", "nearest"]
)
def test_weights_that_no_link_stores_are_named(tx):
    with pytest.raises(ValueError, match="no link stores 'w', which is of 16 bits"):
        hs.check_chain(tx, P)


@pytest.mark.slow
def test_a_check_leaves_no_trace():
    tx = hs.adamw(1e-3)
    expected = run(tx, P, G)
    hs.check_chain(tx, P)
    assert_trees_same(run(tx, P, G), expected)


# --- steps that are left out -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float32"])
def test_a_step_with_a_nan_or_an_infinity_is_left_out_whole(dtype):
    """The next step is the one that would have been: same counts, same words."""
    rows = jax.tree.map(lambda g: g.astype(dtype), G)
    inner = hs.adamw(1e-2, param_storage="split8")
    tx = hs.skip_nonfinite(inner)
    expected = run(inner, P, rows)
    step = jax.jit(functools.partial(take_step, tx))
    params, state = P, tx.init(P)
    for k in range(3):
        good = jax.tree.map(lambda g, k=k: g[k], rows)
        for bad in (jnp.nan, -jnp.inf):
            before = params, state.inner_state
            params, state = step(params, state, {**good, "b": good["b"].at[2].set(bad)})
            assert_trees_same((params, state.inner_state), before)
        assert (int(state.notfinite_count), bool(state.last_finite)) == (2, False)
        params, state = step(params, state, good)
        assert (int(state.notfinite_count), bool(state.last_finite)) == (0, True)
    assert_trees_same((params, state.inner_state), expected)
    assert int(state.total_notfinite) == 6


def test_a_caller_may_leave_a_step_out():
    tx = hs.skip_nonfinite(hs.sgd(1e-2))
    g = jax.tree.map(lambda rows: rows[0], G)
    state = tx.init(P)
    updates, after = jax.jit(tx.update)(g, state, P, skip=jnp.array(True))
    assert_trees_same(optax.apply_updates(P, updates), P)
    assert_trees_same(after.inner_state, state.inner_state)


def without_spikes(tx):
    """Return a wrapper in the form of MaxText's `skip_step_on_spikes`."""

    def update(updates, state, params, loss):
        zeros = jax.tree.map(jnp.zeros_like, updates)
        step = functools.partial(tx.update, updates, state, params)
        return jax.lax.cond(loss > 10, lambda: (zeros, state), step)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def test_what_leaves_steps_out_by_cond_gets_float32_gradients_or_is_refused_by_name():
    p, rows = {"w": weights((8, 8))}, gradients(3, (8, 8), "bfloat16")
    with pytest.raises(TypeError, match=r"check_chain: a wrapper leaves steps out by lax\.cond") as caught:
        hs.check_chain(without_spikes(hs.adamw(1e-2)), p, loss=1.0)
    way = "optax.chain(optax.stateless(lambda g, _: optax.tree.cast(g, jnp.float32)), wrapper)."
    assert str(caught.value).endswith(way)
    tx = eval(way[:-1], {"optax": optax, "jnp": jnp, "wrapper": without_spikes(hs.adamw(1e-2))})
    hs.check_chain(tx, p, loss=1.0)
    step = jax.jit(functools.partial(take_step, tx))
    params, state = p, tx.init(p)
    for g, loss in zip(rows[jnp.array([0, 2, 1, 2])], (1.0, 11.0, 1.0, 1.0), strict=True):
        params, state = step(params, state, {"w": g}, loss=loss)
    assert_trees_same((params, state[1]), run(hs.adamw(1e-2), p, {"w": rows}))
    assert "Nothing is lost" in str(
        hs.diagnose(optax.apply_if_finite(hs.adamw(1e-2), 3), p, {"w": jnp.ones((8, 8))})
    )


LAST = 2**31 - 1
COUNTED = {
    "adamw": hs.adamw(1e-3),
    "lion": hs.lion(1e-3),
    "a schedule": hs.sgd(lambda count: 1e-3),
    "compensate": hs.adamw(1e-3, param_storage="compensated"),
    "split_params": hs.adamw(1e-3, param_storage="split16"),
    "store_state": hs.store_state(optax.trace(0.9), "bfloat16"),
    "accumulate_gradients": hs.accumulate_gradients(optax.identity(), 4),
    "ema_params": hs.ema_params(0.9),
    "skip_nonfinite": hs.skip_nonfinite(optax.identity()),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts_stop_where_int32_ends(name):
    """Contract W5: they never turn negative."""
    tx, params = COUNTED[name], {"w": jnp.ones(3, jnp.bfloat16)}

    def at_the_end(path, x):
        return jnp.full_like(x, LAST) if jax.tree_util.keystr(path).endswith("count") else x

    state = jax.tree_util.tree_map_with_path(at_the_end, tx.init(params))
    if name == "skip_nonfinite":
        params = {"w": jnp.full(3, jnp.nan, jnp.bfloat16)}
        state = state._replace(notfinite_count=jnp.int32(LAST), total_notfinite=jnp.int32(LAST))
    args = (params, state) if name == "ema_params" else (params, state, params)
    _, after = jax.jit(tx.update)(*args)
    before, after = ([x for x in jax.tree.leaves(tree) if x.dtype == jnp.int32] for tree in (state, after))
    ends = [int(y) for x, y in zip(before, after, strict=True) if x == LAST]
    assert ends
    assert set(ends) == {LAST}


def test_weights_that_are_stepped_as_one_vector_are_known_by_their_updates():
    tx = optax.flatten(hs.adamw(1e-3))
    narrow = {"w": weights(4), "b": weights(3)}
    hs.check_chain(tx, narrow)
    with pytest.raises(ValueError, match="check_chain: no link stores 'w'"):
        hs.check_chain(tx, {**narrow, "b": weights(3, "float32")})  # all of which are then float32
