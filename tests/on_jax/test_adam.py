"""Adam gives the bits of the reference, for every dtype, rounding and option."""

import jax.numpy as jnp
import pytest

import halfstep_jax as hs
from backends.on_jax import from_jax
from compare import assert_same
from halfstep_spec.vectors import Array
from on_jax.steps import (
    PLAIN_STATES,
    assert_trees_same,
    gradients,
    moments,
    run,
    spec_adamw,
    spec_run,
    weights,
)

LEAF = "layer/kernel"


def nest(array):
    return {"layer": {"kernel": array}}


def check_against_spec(param_dtype, size, steps, param_storage, **stored):
    """Run both and compare params, mu and nu."""
    given = {k: "nearest_unchecked" if x == "nearest" else x for k, x in stored.items()}
    tx = hs.adamw(3e-3, weight_decay=0.1, param_storage=param_storage, seed=2**40 + 3, **given)
    p, rows = weights(size, param_dtype), gradients(steps, size)
    params, state = run(tx, nest(p), nest(rows))
    mu, nu = moments(state)
    step = spec_adamw(param_dtype, param_storage, seed=2**40 + 3, **stored)
    bits, reference = spec_run(step, p, rows, LEAF, 3e-3)
    for actual, expected, dtype in (
        (params, bits, param_dtype),
        (mu, reference.mu, stored["mu_dtype"]),
        (nu, reference.nu, stored["nu_dtype"]),
    ):
        assert_same(from_jax(actual["layer"]["kernel"]), Array.of(expected, dtype), f"{param_dtype} {stored}")


def moment_storages(name):
    # Plain float16 is refused as a second moment.
    for dtype in PLAIN_STATES if name == "mu" else ("float32", "bfloat16"):
        for rounding in ("nearest",) if dtype == "float32" else ("nearest", "stochastic"):
            yield {f"{name}_dtype": dtype, f"{name}_rounding": rounding}


MU, NU = list(moment_storages("mu")), list(moment_storages("nu"))
PARAMS = [("float32", "nearest")] + [
    (d, s) for d in ("bfloat16", "float16") for s in ("stochastic", "nearest")
]


@pytest.mark.slow
@pytest.mark.parametrize(("param_dtype", "param_storage"), PARAMS)
@pytest.mark.parametrize("mu", MU, ids=lambda mu: "-".join(mu.values()))
def test_a_long_run_has_the_bits_of_the_reference(param_dtype, param_storage, mu):
    for nu in NU:
        check_against_spec(param_dtype, 100_000, 20, param_storage, **mu, **nu)


def test_leaves_of_any_shape_have_the_bits_of_the_reference():
    shapes = {str(shape): shape for shape in [(), (0,), (1,), (3, 0, 2), (2, 3, 5), (1, 1, 7)]}
    params = {name: weights(shape) for name, shape in shapes.items()}
    rows = {name: gradients(3, shape) for name, shape in shapes.items()}
    after, state = run(hs.adamw(3e-3, weight_decay=0.1), params, rows)
    step = spec_adamw("bfloat16", mu_dtype="bfloat16", nu_dtype="bfloat16")
    for name in shapes:
        bits, reference = spec_run(step, params[name], rows[name], name, 3e-3)
        assert_same(from_jax(after[name]), Array.of(bits, "bfloat16"), name)
        assert_same(from_jax(moments(state)[1][name]), Array.of(reference.nu, "bfloat16"), name)


@pytest.mark.slow
def test_gradients_of_16_bits_count_as_their_float32_values():
    for dtype in ("bfloat16", "float16"):
        p, rows = {"w": weights(100)}, gradients(3, 100, dtype)
        narrow = run(hs.adamw(1e-3), p, {"w": rows})
        wide = run(hs.adamw(1e-3), p, {"w": rows.astype(jnp.float32)})
        assert_trees_same(narrow, wide)


@pytest.mark.slow
def test_auto_rounds_stochastically_by_a_rate_that_is_an_array():
    """It is not known when the link is built, in or out of jit."""
    p, rows = {"w": weights(500)}, {"w": gradients(3, 500)}
    array = run(hs.adamw(1e-3, b1=jnp.float32(0.9)), p, rows)
    named = run(hs.adamw(1e-3, b1=0.9, mu_rounding="stochastic"), p, rows)
    assert_trees_same(array, named)
