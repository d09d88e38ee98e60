"""Codebooks: tables and codes are those of the reference, looked up and computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep.storage.tables import TABLES as SHARED_TABLES
from halfstep_jax.numbers import tables
from halfstep_spec.storage.tables import TABLES, decode_table, encode_table
from halfstep_spec.vectors import Array


def near_every_number(name: str) -> np.ndarray:
    """Return a table, its midpoints, what is next to both, and values of every size between them."""
    numbers = TABLES[name].values
    middles = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    rows = [numbers, middles]
    for end in (-4, 4):
        step = np.concatenate(rows[:2])
        for _ in range(4):
            step = np.nextafter(step, np.float32(end))
            rows.append(step)
    rng = np.random.default_rng(0)
    spread = np.exp(rng.uniform(-18, 1, 50_000)) * rng.choice([-1, 1], 50_000)
    powers = 10.0 ** np.arange(-9, 1)
    y = np.concatenate([*rows, spread, powers, -powers, [0.0, -0.0, 1e-38, -1e-38, 1e-45, -1e-45]])
    return (y if TABLES[name].signed else np.abs(y)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic8", "udynamic8"])
def test_what_accelerators_compute_is_what_a_cpu_looks_up(name):
    table = SHARED_TABLES[name]
    index, codes = jnp.arange(257), jnp.arange(256)
    numbers = np.append(TABLES[name].values, np.float32(np.inf))
    for compiled in (lambda f: f, jax.jit):  # with products that are fused with the sum, and without
        computed = compiled(functools.partial(tables._computed, table=table))(index)
        assert_same(from_jax(computed), Array.of(numbers))
        by_code = compiled(functools.partial(tables._computed_by_code, table=table))(codes)
        assert_same(from_jax(by_code), from_jax(tables._looked_up_by_code(codes, table)))


@pytest.mark.parametrize("name", TABLES)
def test_values_next_to_every_number_and_middle_get_the_codes_of_the_reference(name):
    y, ours = near_every_number(name), SHARED_TABLES[name]
    encode = jax.jit(functools.partial(tables.encode_table, table=ours))
    random = spec.random_words(0, 1, "w", 1, y.shape)
    for words in (None, np.zeros_like(random), np.full_like(random, 2**32 - 1), random):
        expected = encode_table(y, words, TABLES[name])
        codes = encode(jnp.asarray(y), None if words is None else jnp.asarray(words.view(np.int32)))
        assert_same(from_jax(codes.astype(jnp.uint8)), Array.of(expected), name)
    decoded = jax.jit(functools.partial(tables.decode_table, table=ours))(jnp.asarray(expected, jnp.int32))
    assert_same(from_jax(decoded), Array.of(decode_table(expected, TABLES[name])))
