"""Ways to store a weight: small updates survive, and what lies inside sees float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from on_jax.steps import KEEPING, assert_trees_same, gradients, run, take_step, weights


def steps_of(tx, params, gradient, count: int):
    """Take `count` steps in one loop, with the gradient that `gradient` makes of the step's number."""

    @jax.jit
    def loop(params, state):
        return jax.lax.fori_loop(0, count, lambda t, now: take_step(tx, *now, gradient(t)), (params, state))

    return loop(params, tx.init(params))


@pytest.mark.slow
def test_a_schedule_a_clip_and_injected_numbers_work_inside_a_wrapper():
    schedule = optax.cosine_decay_schedule(1e-2, 20)

    def links(rate):
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            hs.scale_by_adam(mu_dtype="bfloat16"),
            hs.add_decayed_weights(0.1),
            hs.scale_by_learning_rate(rate),
        )

    def wrapped(wrapper):
        return lambda rate: wrapper(links(rate))

    p, g = {"w": weights((40,))}, {"w": gradients(10, (40,))}
    expected, _ = run(links(schedule), jax.tree.map(lambda x: x.astype(jnp.float32), p), g)
    for wrapper in (hs.split_params, hs.keep_master_params):
        params, state = run(wrapper(links(schedule)), p, g)
        assert_trees_same(hs.float32_params(params, state), expected)
        injected = optax.inject_hyperparams(wrapped(wrapper), hyperparam_dtype=jnp.float32)(0.01)
        constant, _ = run(wrapper(links(0.01)), p, g)
        assert_trees_same(run(injected, p, g)[0], constant)


def test_two_links_that_hide_the_same_value_do_not_cancel_each_other():
    """Both add what arrives, a product, to something: fused with it, some bits would differ."""
    p, g = {"w": weights((1000,), "float32")}, {"w": gradients(2, (1000,))}
    rate = hs.scale_by_learning_rate(0.3)
    for tx in (
        optax.chain(rate, hs.add_decayed_weights(0.1, absolute=True)),
        optax.chain(rate, hs.compensate()),
        hs.keep_master_params(rate),
    ):
        assert_trees_same(run(tx, p, g), run(tx, p, g, compiled=False))


@functools.cache
def displacement(rule: str, lr: float, steps: int) -> float:
    """Return how far weights go under a constant update, over how far they should."""
    p = {"w": jnp.full(2048, 0.05, jnp.bfloat16)}
    chain = hs.scale_by_learning_rate(lr)
    tx = {
        "stochastic": lambda: optax.chain(chain, hs.round_stochastically()),
        "compensated": lambda: optax.chain(chain, hs.compensate()),
        "nearest": lambda: chain,
        "split8": lambda: hs.split_params(chain, 8),
        "split16": lambda: hs.split_params(chain),
        "master": lambda: hs.keep_master_params(chain),
    }[rule]()
    params, state = steps_of(tx, p, lambda t: {"w": jnp.ones(2048)}, steps)
    moved = hs.float32_params(p, tx.init(p))["w"] - hs.float32_params(params, state)["w"]
    return float(np.asarray(moved, np.float64).mean() / (lr * steps))


@pytest.mark.parametrize("lr", [1e-5, 1e-6])
@pytest.mark.parametrize(
    "rule", [name for name in spec.PARAM_STORAGES if name not in ("nearest", "compensated")]
)
def test_small_updates_survive(rule, lr):
    # Stochastic rounding: n steps of u and a gap of 2^-12 leave a spread of sqrt(2^-12 u n) per weight: over
    # 2,048 weights 0.4 % of the way n u = 0.01, and 0.6 % of 0.004.
    assert 0.98 < displacement(rule, lr, 1000 if lr == 1e-5 else 4000) < 1.02


def test_compensation_ends_where_its_own_eight_bits_end():
    """Near 0.05 the compensation grows to 2^-13, with gaps of 2^-21: 21, 2.1 or 0.2 make an update."""
    assert 0.98 < displacement("compensated", 1e-5, 1000) < 1.02
    assert 0.94 < displacement("compensated", 1e-6, 4000) < 0.98
    assert displacement("compensated", 1e-7, 4000) < 0.1


def test_nearest_loses_small_updates():
    assert displacement("nearest", 1e-5, 1000) == 0


@pytest.mark.slow
def test_what_lies_inside_sees_float32_weights():
    seen = []

    def update(updates, state, params=None):
        seen.append(params["w"].dtype)
        return updates, state

    inner = optax.GradientTransformation(lambda p: (seen.append(p["w"].dtype), optax.EmptyState())[1], update)
    p = {"w": weights((9,), "float16")}
    for tx in (hs.split_params(inner), hs.keep_master_params(inner)):
        tx.update({"w": jnp.ones(9)}, tx.init(p), p)
    assert seen == [jnp.float32] * 4


@pytest.mark.parametrize("rule", KEEPING)
def test_missing_gradients_leave_weight_and_state_as_they_are(rule):
    p = {"w": weights((9,)), "v": weights((5,))}
    tx = hs.adamw(1e-2, param_storage=rule)
    params, state = run(tx, p, {"w": gradients(2, (9,)), "v": gradients(2, (5,))})
    updates, new = jax.jit(tx.update)({"w": jnp.ones(9), "v": None}, state, params)
    assert updates["v"] is None
    later = {"w": optax.apply_updates(params["w"], updates["w"]), "v": params["v"]}
    known, before = hs.float32_params(later, new), hs.float32_params(params, state)
    assert_trees_same(known["v"], before["v"])
    assert (known["w"] != before["w"]).any()


@pytest.mark.parametrize("storage", [name for name in spec.PARAM_STORAGES if name != "nearest"])
def test_weights_stay_within_the_bounds_of_a_link(storage):
    """A compensation of the old weight took weights below zero: their root was NaN."""
    inner = optax.chain(hs.adamw(0.1, param_storage="nearest"), optax.keep_params_nonnegative())
    tx = hs.chain(hs.store_params(inner, storage))
    step, params = jax.jit(functools.partial(take_step, tx)), {"w": jnp.abs(weights((1000,))) * 16}
    state = tx.init(params)
    for g in gradients(20, (1000,)):
        params, state = step(params, state, {"w": g})
        assert (params["w"] >= 0).all()
    assert 10 < (params["w"] == 0).sum() < 990
