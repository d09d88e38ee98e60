"""Codebooks: tables, codes and steps are those of the reference; packed codes in states and over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep.storage.tables import TABLES as SHARED_TABLES
from halfstep_jax.numbers import tables
from halfstep_spec.storage.tables import TABLES, decode_table, encode_table
from halfstep_spec.vectors import Array
from on_jax.steps import (
    EIGHT,
    FOUR,
    assert_same_in_every_mode,
    assert_trees_same,
    gradients,
    run,
    weights,
)


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


CUTS = [((4, 3, 5, 7), 8), ((4, 3, 5, 7), 100), ((4, 3, 5, 7), 128), ((5, 1), "row"), ((9, 7), "row")]
CUTS += [((7, 5), None), ((300,), 8), ((), "row"), ((0, 8), 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "block_size"), CUTS, ids=str)
@pytest.mark.parametrize("table", ["dynamic8", "dynamic4", "ulinear4"])
def test_every_cut_into_blocks_and_bytes_is_that_of_the_reference(table, shape, block_size):
    fmt = hs.codebook(table, block_size, 0, 0)
    x = np.abs(np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    encode, expected = (
        jax.jit(lambda x: fmt.encode(x, None)),
        spec.codebook(table, block_size, 0, 0).encode(x, None),
    )
    stored = encode(jnp.asarray(x))
    assert stored.codes.shape == fmt.code_shape(shape)
    assert_same(from_jax(stored.codes), Array.of(expected.codes))
    assert_same(from_jax(stored.scale), Array.of(expected.scale))
    decoded = spec.codebook(table, block_size, 0, 0).decode(expected)
    assert_same(from_jax(jax.jit(fmt.decode)(stored)), Array.of(decoded))
    assert_trees_same(fmt.zeros_like(jnp.asarray(x)), encode(jnp.zeros(shape)))


@pytest.mark.parametrize("table", TABLES)
def test_what_is_stored_does_not_move_when_it_is_stored_again(table):
    fmt, positive = hs.codebook(table, 8, 0, 0), not TABLES[table].signed
    x = np.random.default_rng(3).uniform(-3, 3, (16, 200)).astype(np.float32)
    x = np.abs(x) + np.float32(1e-3) if positive else x
    # Of every block the maximum, stored as itself.
    x[:, ::8] = -4 * TABLES[table].values[0] if TABLES[table].signed else 4
    words = jnp.asarray(spec.random_words(0, 1, "w", 1, x.shape))

    @jax.jit
    def there_and_back(x, words):
        return fmt.decode(fmt.encode(x, words, keep_nonzero="always" if positive else "never"))

    once = there_and_back(jnp.asarray(x), words)
    for word in (0, 2**32 - 1):
        assert_same(from_jax(there_and_back(once, jnp.full_like(words, word))), from_jax(once), table)


@pytest.mark.parametrize(
    ("mu", "nu", "block_size"),
    [("dynamic8", "udynamic8", 8), ("dynamic4", "ulinear4", 8), ("dynamic4", "udynamic4", "row")],
)
def test_steps_have_the_bits_of_the_reference(mu, nu, block_size):
    formats = {name: (table, block_size, 0, 0) for name, table in (("mu_dtype", mu), ("nu_dtype", nu))}
    options = {"seed": 5, "mu_rounding": "stochastic"}
    tx = hs.adamw(3e-3, weight_decay=0.1, **options, **{name: hs.codebook(*a) for name, a in formats.items()})
    p, rows = weights((8, 21), "bfloat16"), gradients(3, (8, 21))
    params, state = run(tx, {"w": p}, {"w": rows})
    rule = spec.ScaleByAdam(**options, **{name: spec.codebook(*a) for name, a in formats.items()})
    step = spec.Step(rule, weight_decay=0.1)
    bits = from_jax(p).bits
    expected = step.init(bits)
    for g in np.asarray(rows):
        bits, expected = step.step(bits, g, expected, "w", np.float32(3e-3))
    assert_same(from_jax(params["w"]), Array.of(bits, "bfloat16"), "p")
    for name, stored in expected.rule.moments.items():
        assert_same(from_jax(optax.tree.get(state, name)["w"]), Array.of(stored.codes), name)
        assert_same(from_jax(optax.tree.get(state, f"{name}_scale")["w"]), Array.of(stored.scale), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats", [pytest.param(EIGHT, id="8", marks=pytest.mark.slow), pytest.param(FOUR, id="4")]
)
def test_op_by_op_compiled_and_over_devices_give_the_same_bits(formats):
    assert_same_in_every_mode(hs.adamw(1e-3, weight_decay=0.1, seed=3, **formats))


def test_small_and_flat_leaves_are_kept_in_float32():
    params = {"w": weights((64, 256)), "small": weights((64, 63)), "flat": weights((5000,))}
    state = hs.scale_by_adam(**FOUR).init(params)
    found = {name: (str(x.dtype), x.shape) for name, x in state.mu.items()}
    assert found == {"w": ("uint8", (64, 128)), "small": ("float32", (64, 63)), "flat": ("float32", (5000,))}


def test_map_params_meets_packed_codes_with_their_params():
    params = {"w": weights((64, 256)), "b": weights((64,))}
    tx = hs.adamw(1e-3, **FOUR)
    seen = optax.tree.map_params(tx, lambda x, p: (x.shape, p.shape), tx.init(params), params)
    assert seen[0].mu == {"w": ((64, 128), (64, 256)), "b": ((64,), (64,))}
    assert seen[0].nu_scale.keys() == {"w"}


def test_init_takes_shapes_alone():
    tx, params = hs.adamw(1e-3, **FOUR), {"w": weights((64, 65))}
    shapes = jax.eval_shape(tx.init, jax.eval_shape(lambda: params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tx.init(params)
    )


def test_state_of_another_shape_is_refused():
    tx, params = hs.scale_by_adam(**FOUR), {"w": weights((64, 200))}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"update of 'w' has shape \(64, 202\), its mu \(64, 100\)"):
        tx.update({"w": jnp.ones((64, 202))}, state)
    scale = {"w": jnp.full((64, 2), 9, jnp.uint8)}
    with pytest.raises(ValueError, match=r"mu_scale of 'w' holds 9, outside \[10, 253\]"):
        tx.update({"w": jnp.ones((64, 200))}, state._replace(mu_scale=scale))
