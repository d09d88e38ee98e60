"""Updates in the dtype of the weights: for libraries that add p + u themselves; where it may stand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, gradients, weights

P = {"w": weights((6, 4)), "b": weights((5,), "float32"), "h": weights((3,), "float16")}
G = {"w": gradients(3, (6, 4)), "b": gradients(3, (5,), seed=2), "h": gradients(3, (3,), seed=3)}
STORAGES = {
    "stochastic": lambda: hs.adamw(1e-3),
    "feedback": lambda: hs.adamw(1e-3, param_storage="feedback"),
    "compensated": lambda: hs.adamw(1e-3, param_storage="compensated"),
    "eight_bit": lambda: hs.adamw(1e-3, recipe="eight_bit"),
}


def train(tx, add):
    params, state = P, tx.init(P)
    step = jax.jit(lambda params, state, g: (lambda u, s: (add(params, u), s))(*tx.update(g, state, params)))
    for k in range(3):
        params, state = step(params, state, jax.tree.map(lambda g, k=k: g[k], G))
    return params, state


def plus(params, updates):
    return jax.tree.map(lambda p, u: p + u, params, updates)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "stochastic" else pytest.mark.slow) for x in STORAGES]
)
def test_a_plain_sum_gives_the_weights_and_state_of_optax(name):
    """Updates of 1e-3 of weights near 0.05 are below 256 units in their last place, 2^-13: exact."""
    params, (state, _) = train(hs.chain(STORAGES[name](), hs.cast_updates()), plus)
    assert_trees_same((params, state), train(STORAGES[name](), optax.apply_updates))
    assert jax.tree.map(lambda p: p.dtype, params) == jax.tree.map(lambda p: p.dtype, P)


def test_an_update_of_many_units_is_off_by_its_own_rounding():
    params = {"w": jnp.asarray(weights((4000,), "float32") * 1e-6, jnp.bfloat16)}
    tx = hs.chain(hs.sgd(1.0), hs.cast_updates())
    g = {"w": gradients(1, (4000,))[0]}
    updates, _ = tx.update(g, tx.init(params), params)
    due = -np.asarray(g["w"], np.float64)
    # Once for the weight, to a neighbour, and once for the update, to nearest.
    assert (np.abs(np.asarray(updates["w"], np.float64) - due) <= 2.0**-7 * np.abs(due) + 1e-7).all()


@pytest.mark.parametrize(
    "name", ["split8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("split16", "master"))]
)
def test_it_is_refused_after_what_keeps_further_bits(name):
    tx = hs.chain(hs.adamw(1e-3, param_storage=name), hs.cast_updates())
    with pytest.raises(ValueError, match=r"cast_updates rounds the updates that .*\"compensated\"") as caught:
        tx.init(P)
    assert "'w'" in str(caught.value) or "'h'" in str(caught.value)


def test_a_link_behind_it_is_found():
    tx = optax.chain(hs.adamw(1e-3), hs.cast_updates(), optax.scale(0.5))
    with pytest.raises(ValueError, match="scale changes the updates that round_stochastically applies"):
        hs.check_chain(tx, P)


@pytest.mark.slow
def test_diagnose_finds_no_loss_in_it():
    tx = hs.chain(hs.adamw(1e-5), hs.cast_updates())
    assert hs.diagnose(tx, P, jax.tree.map(lambda g: g[0], G)).updates_lost == 0


def test_float64_weights_get_float64_updates_and_none_stays_none():
    with jax.enable_x64(True):
        p = {"w": jnp.ones(2, jnp.float64), "v": jnp.ones(2)}
        tx = hs.chain(hs.sgd(1e-3), hs.cast_updates())
        updates = jax.eval_shape(lambda p: tx.update({"w": p["w"], "v": None}, tx.init(p), p)[0], p)
        assert updates["w"].dtype == jnp.float64
        assert updates["v"] is None


def test_it_needs_params():
    with pytest.raises(ValueError, match="cast_updates: params is None"):
        hs.cast_updates().update(P, optax.EmptyState())
