"""Stochastically rounded weights, through Optax's own `apply_updates` and through ours."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep_spec.vectors import Array
from on_jax.steps import DTYPES, assert_trees_same, gradients, weights

NARROW = ("bfloat16", "float16")


def bits(values) -> np.ndarray:
    values = np.asarray(values)
    return values.view(f"u{values.itemsize}")


def stored(p, u, seed=0, step=1, compiled=True):
    """Return the emitted update and what `optax.apply_updates` makes of it."""
    tx = hs.round_stochastically(seed)

    def both(p, u):
        state = tx.init({"w": p})._replace(count=jnp.int32(step - 1))
        updates, _ = tx.update({"w": u}, state, {"w": p})
        return updates["w"], optax.apply_updates({"w": p}, updates)["w"]

    return (jax.jit(both) if compiled else both)(p, u)


def landing_update(p, u, dtype, words):
    """Return the reference's update."""
    return spec.param_storage("stochastic", dtype).emit(bits(p), np.asarray(u), None, words)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_update_and_the_landing_are_those_of_the_reference(dtype, compiled):
    p, u = weights(20_000, dtype), gradients(1, 20_000)[0] * 2.0**-9
    words = spec.random_words(2**50, 7, "w", spec.Role.PARAM, p.shape)
    emitted, applied = stored(p, u, 2**50, 7, compiled)
    expected = landing_update(p, u, dtype, words)
    assert_same(from_jax(emitted), Array.of(expected, "float32"))
    assert_same(from_jax(applied), Array.of(spec.apply_updates(bits(p), expected, dtype), dtype))
    if dtype != "float32":
        rounded = spec.round_to(np.asarray(p, np.float32) + np.asarray(u), dtype, words)
        assert_same(from_jax(applied), Array.of(rounded, dtype))


def corners(dtype):
    """Return pairs of special weights with special updates, subnormal float32 sums left out (A8)."""
    top = float(jnp.finfo(dtype).max)
    special = [0.0, -0.0, 1.0, -1.0, 1.0078125, 2.0**-14, top, -top, np.inf, -np.inf, np.nan]
    updates = [0.0, -0.0, 2.0**-9, -(2.0**-20), 1.0, -1.0, -1.0 + 2.0**-18, -2.0, 7e-6]
    updates += [top, -top, 3e38, np.inf, np.nan]
    p, u = np.meshgrid(np.array(special, np.float32), np.array(updates, np.float32))
    return jnp.asarray(p.ravel().astype(DTYPES[dtype])), jnp.asarray(u.ravel())


@pytest.mark.parametrize("dtype", NARROW)
def test_corner_classes_land_as_the_contract_says(dtype):
    p, u = corners(dtype)
    words = spec.random_words(0, 1, "w", spec.Role.PARAM, p.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = landing_update(p, u, dtype, words)
        expected_weight = spec.apply_updates(bits(p), expected, dtype)
    for compiled in (True, False):
        emitted, applied = stored(p, u, compiled=compiled)
        assert_same(from_jax(emitted), Array.of(expected, "float32"))
        assert_same(from_jax(applied), Array.of(expected_weight, dtype))
        ours = hs.apply_updates({"w": p}, {"w": u}, 0, 1)
        assert_same(from_jax(ours["w"]), Array.of(expected_weight, dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_weight_that_does_not_move_gets_minus_zero(dtype):
    p = jnp.asarray(np.array([0.0, -0.0, 1.0, -3.0, np.inf], DTYPES[dtype]))
    emitted, applied = stored(p, jnp.zeros(5))
    assert bits(emitted).tolist() == [0x80000000] * 5
    assert_same(from_jax(applied), from_jax(p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_updates_is_the_link_and_apply_updates_of_optax(dtype):
    p, u = weights(5000, dtype), gradients(1, 5000)[0] * 1e-3
    _, applied = stored(p, u, seed=9, step=4)
    for apply in (hs.apply_updates, jax.jit(hs.apply_updates)):
        assert_trees_same(apply({"w": p}, {"w": u}, jnp.array([0, 9], jnp.uint32), 4)["w"], applied)
