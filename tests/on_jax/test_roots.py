"""Roots and quotients are correctly rounded where a platform's own are not: from approximate ones.

Contract: A3, C3. What a GPU gives is imitated: the right result, moved to a number beside it.
"""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import halfstep_jax as hs
from halfstep.storage.integers import FINE_BASE, FINE_SCALE
from halfstep.storage.unsigned_floats import unsigned_values
from halfstep_jax.numbers import roots
from halfstep_jax.numbers.arrays import JaxArrays

COUNT = 1 << 17


def numbers(seed: int, lowest: int, highest: int) -> np.ndarray:
    """Return float32 numbers with exponent fields in a range; a third have mantissas near a power of two."""
    rng = np.random.default_rng(seed)
    edges = np.concatenate([np.arange(32), np.arange(2**23 - 32, 2**23)])
    mantissa = np.where(rng.random(COUNT) < 1 / 3, rng.choice(edges, COUNT), rng.integers(0, 2**23, COUNT))
    field = rng.integers(lowest, highest, COUNT)
    return (field << 23 | mantissa).astype(np.uint32).view(np.float32)


def moved(x: np.ndarray, steps: int) -> np.ndarray:
    """Return the numbers some steps away."""
    return (x.view(np.int32) + np.int32(steps)).view(np.float32)


def assert_same(x, y):
    np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))


def test_a_root_is_right_from_either_neighbour():
    x = numbers(0, 1, 255)
    right, corrected = np.sqrt(x), jax.jit(roots.corrected_root)
    for steps in (-1, 0, 1):
        assert_same(corrected(x, moved(right, steps)), right)


def test_below_a_power_of_two_a_unit_is_that_above_it():
    x = np.array([0.25, 1.0, 4.0], np.float32)
    assert_same(roots.corrected_root(x, moved(np.sqrt(x), -2)), np.sqrt(x))
    assert_same(
        roots.corrected_quotient(x, x + x, moved(np.full(3, 0.5, np.float32), -4)), np.full(3, 0.5, "f4")
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_a_quotient_is_right_from_two_numbers_away(sign):
    x, y = numbers(1, 70, 180), np.float32(sign) * numbers(2, 70, 180)
    right, corrected = x / y, jax.jit(roots.corrected_quotient)
    for steps in (-2, -1, 0, 1, 2):
        assert_same(corrected(x, y, moved(right, steps)), right)


def test_a_subnormal_numerator_moves_a_quotient_by_no_more_than_six_numbers():
    """It has no hidden bit, and is not worse off than by what the device itself may be wrong."""
    x = (numbers(3, 0, 1).view(np.uint32) >> np.arange(COUNT, dtype=np.uint32) % 20).view(np.float32)
    y = numbers(4, 1, 100)
    with np.errstate(over="ignore"):
        about = x / y
    corrected = np.asarray(jax.jit(roots.corrected_quotient)(x, y, about))
    in_range = (np.abs(about) >= np.float32(2.0**-124)) & (np.abs(about) < np.float32(2.0**127))
    off = np.abs(corrected.view(np.int32) - about.view(np.int32))[in_range]
    assert in_range.sum() > COUNT // 2
    assert 0 < off.max() <= 6


def test_zero_infinity_and_nan_are_what_they_are():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 3.0, 1e-40], np.float32)
    x, y = (grid.ravel() for grid in np.meshgrid(x, x))
    with np.errstate(all="ignore"):
        quotient, root = x / y, np.sqrt(x)
    # That of a GPU has every bit set.
    quotient[np.isnan(quotient)], root[np.isnan(root)] = np.array([0x7FFFFFFF] * 2, np.uint32).view(
        np.float32
    )
    special = (x == 0) | ~np.isfinite(x) | (y == 0) | ~np.isfinite(y)
    assert_same(jax.jit(roots.corrected_quotient)(x, y, quotient)[special], quotient[special])
    special = (x <= 0) | ~(np.abs(x) < np.inf) | (x == np.float32(1e-40))
    assert_same(jax.jit(roots.corrected_root)(x, root)[special], root[special])


def program(function, count: int) -> list[str]:
    """Return the operations that XLA compiles for the CPU here, without names."""
    arguments = [jax.ShapeDtypeStruct((256,), jnp.float32)] * count
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return [
        re.sub(r", metadata=\{[^}]*\}|%[\w.-]+", "", line) for line in text.splitlines() if " = f32[" in line
    ]


@pytest.mark.parametrize(
    ("ours", "own", "count"),
    [(roots.sqrt, lax.sqrt, 1), (roots.divide, lax.div, 2)],
    ids=["root", "quotient"],
)
def test_on_a_cpu_the_program_is_that_of_the_plain_operation(ours, own, count):
    assert program(own, count)
    assert program(ours, count) == program(own, count)


def lowered(tx, platform: str) -> str:
    params = {"w": jax.ShapeDtypeStruct((131, 257), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step).trace(params, state, params).lower(lowering_platforms=(platform,)).as_text()


def test_no_root_and_no_quotient_of_a_step_is_left_uncorrected_on_a_gpu(monkeypatch):
    adam = hs.adamw(1e-3, nesterov=True, **hs.recipes.four_bit)
    text = lowered(adam, "cuda")
    assert "stablehlo.divide" in text
    assert "stablehlo.sqrt" in text
    # What is corrected is now no root and no quotient: any that is left is not corrected.
    others = {"sqrt": lambda x: x, "div": lambda x, y: x + y}
    monkeypatch.setattr(roots, "lax", types.SimpleNamespace(**vars(lax) | others))
    chain = optax.chain(hs.clip_by_global_norm(1.0, exact=True), hs.scale_by_adan())
    for tx in (adam, hs.lamb(1e-3, **hs.recipes.one_pass), chain):
        text = lowered(tx, "cuda")
        assert "stablehlo.divide" not in text
        assert "stablehlo.sqrt" not in text


def test_derivatives_are_those_of_the_plain_operations():
    x, y = jnp.float32(3.0), jnp.float32(7.0)
    assert jax.grad(roots.sqrt)(x) == jax.grad(lax.sqrt)(x)
    assert jax.grad(roots.divide, argnums=(0, 1))(x, y) == jax.grad(lax.div, argnums=(0, 1))(x, y)


@pytest.mark.parametrize("shared", [(254, 1), (254, 512)])
def test_a_quotient_by_the_scale_of_a_block_is_rounded_once(shared):
    scale = unsigned_values(JaxArrays(), jnp.arange(1, 255), FINE_SCALE, FINE_BASE)
    scale = np.broadcast_to(np.asarray(scale)[:, None], shared)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((254, 512)) * 50).astype(np.float32) * scale
    x[:, :8] = scale[:, :1] * np.float32([0, 1, 2, 127, 0.5, 2**-17, 2**-20, 200])
    assert_same(jax.jit(roots.divide_by_scale)(x, scale), x / scale)
    assert_same(jax.jit(roots.quotient_by_products)(x, np.broadcast_to(scale, x.shape)), x / scale)
