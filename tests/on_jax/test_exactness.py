"""The bits do not depend on how a step is compiled, nor on what stands before and after our links.

Contract: A1, A2, A7. Float32 params with nearest storage show most: there every last bit of the arithmetic is
visible.
"""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from halfstep_jax.xla.exact import opaque, opaque_product, opaque_zero
from on_jax.steps import assert_trees_same, gradients, run, take_step, weights

STEPS = 4

ADAMW = functools.partial(hs.adamw, weight_decay=0.1)
RECIPES = {
    "float32": ("float32", ADAMW, {"param_storage": "nearest"}),
    "nesterov": ("float32", ADAMW, {"param_storage": "nearest", "nesterov": True, "eps_root": 1e-6}),
    "bfloat16": ("bfloat16", ADAMW, {}),
    "lion": ("float32", functools.partial(hs.lion, weight_decay=0.1), {"param_storage": "nearest"}),
    "momentum": ("float32", hs.sgd, {"param_storage": "nearest", "momentum": 0.9, "nesterov": True}),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("nesterov", "lion", "momentum")]


def case(recipe, shape=600):
    dtype, make, options = RECIPES[recipe]
    tree = {"a": weights(shape, dtype), "b": {"c": weights((2, 3), dtype, seed=5)}}
    rows = {"a": gradients(STEPS, shape), "b": {"c": gradients(STEPS, (2, 3), seed=6)}}
    return functools.partial(make, seed=3, **options), tree, rows


@functools.cache
def op_by_op(recipe, shape=600):
    """Return params and state of a run without jit, which no compiler can change."""
    make, params, rows = case(recipe, shape)
    return run(make(1e-3), params, rows, compiled=False)


def rows_at(rows, k):
    return jax.tree.map(lambda r: r[k], rows)


def jit_of_a_step(tx, params, rows):
    return run(tx, params, rows)


def donated(tx, params, rows):
    step = jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    for k in range(STEPS):
        params, state = step(params, state, rows_at(rows, k))
    return params, state


@functools.partial(jax.jit, static_argnums=0)
def unrolled(tx, params, rows):
    """Init and all steps in one program: seed and count are constants in it."""
    state = tx.init(params)
    for k in range(STEPS):
        params, state = take_step(tx, params, state, rows_at(rows, k))
    return params, state


@functools.partial(jax.jit, static_argnums=0)
def scanned(tx, params, rows):
    def step(carry, row):
        return take_step(tx, *carry, row), None

    return jax.lax.scan(step, (params, tx.init(params)), rows)[0]


def vmapped(tx, params, rows):
    two = jax.tree.map(lambda p: jnp.stack([p, p[::-1]]), params)
    rows = jax.tree.map(lambda r: jnp.stack([r, -r], 1), rows)
    state = jax.vmap(tx.init)(two)
    step = jax.jit(jax.vmap(functools.partial(take_step, tx)))
    for k in range(STEPS):
        two, state = step(two, state, rows_at(rows, k))
    return jax.tree.map(lambda x: x[0], (two, state))


WAYS = (jit_of_a_step, donated, unrolled, scanned, vmapped)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float32", "bfloat16", *SLOW])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_take_steps_gives_the_same_bits(way, recipe):
    make, params, rows = case(recipe)
    assert_trees_same(way(make(1e-3), params, rows), op_by_op(recipe))


# XLA compiles small programs differently: a whole loop of steps becomes one function that LLVM sees through.
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 33])
@pytest.mark.parametrize("way", [unrolled, scanned], ids=lambda way: way.__name__)
def test_small_leaves_get_the_same_bits(way, size):
    make, params, rows = case("float32", size)
    assert_trees_same(way(make(1e-3), params, rows), op_by_op("float32", size))


@pytest.mark.parametrize("recipe", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_hyperparameter_gives_the_same_bits_as_constant_array_schedule_or_injected(recipe):
    make, params, rows = case(recipe)
    named = {"mu_rounding": "nearest"}  # "auto" is stochastic where b1 is an array
    expected = run(make(1e-3, **named), params, rows)
    arrays = {"b1": jnp.float32(0.9), "b2": jnp.float32(0.999), "eps": jnp.float32(1e-8)}
    assert_trees_same(run(make(jnp.float32(1e-3), **arrays, **named), params, rows), expected)
    scheduled, state = run(make(optax.constant_schedule(1e-3), **named), params, rows)
    assert_trees_same(scheduled, expected[0])
    assert int(state[2].count) == STEPS
    injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-3, **named)
    for compiled in (True, False):
        assert_trees_same(run(injected, params, rows, compiled=compiled)[0], expected[0])


def test_a_schedule_is_read_before_the_count_goes_up():
    make, params, rows = case("bfloat16")
    schedule = optax.piecewise_constant_schedule(1e-3, {2: 0.5})
    tx = make(schedule)
    by_schedule, _ = run(tx, params, rows)
    state = tx.init(params)
    for k in range(STEPS):
        now = make(1e-3 if k < 2 else 5e-4)
        updates, inner = now.update(rows_at(rows, k), (*state[:2], optax.EmptyState(), state[3]), params)
        params, state = optax.apply_updates(params, updates), (*inner[:2], state[2], inner[3])
    assert_trees_same(by_schedule, params)


@pytest.mark.slow
def test_weight_decay_by_a_schedule_gives_the_same_bits():
    _, params, rows = case("bfloat16")
    constant = hs.adamw(1e-3, weight_decay=0.1, seed=3)
    scheduled = hs.adamw(1e-3, weight_decay=lambda count: jnp.where(count < 99, 0.1, 0.0), seed=3)
    assert_trees_same(run(scheduled, params, rows)[0], run(constant, params, rows)[0])


# Links of others whose constants and products a compiler would merge with ours if it saw them.
NEIGHBOURS = {
    "scaled gradients": lambda tx: optax.chain(optax.scale(0.3), tx),
    "scaled updates": lambda tx: optax.chain(tx, optax.scale(0.7), hs.round_stochastically(1)),
    "scaled by a schedule": lambda tx: optax.chain(optax.scale_by_schedule(lambda c: 0.3 / (1 + c)), tx),
    "clipped": lambda tx: optax.chain(optax.clip(0.01), tx),
    "the learning rate of Optax": lambda tx: optax.chain(
        hs.scale_by_adam(), optax.scale_by_learning_rate(1e-3), hs.round_stochastically()
    ),
    "absolute decay": lambda tx: optax.chain(
        optax.scale(-1e-3), hs.add_decayed_weights(1e-4, absolute=True), tx
    ),
    "decay before anything": lambda tx: optax.chain(optax.scale(0.3), hs.add_decayed_weights(0.1), tx),
    "our learning rate alone": lambda tx: optax.chain(optax.scale(0.3), hs.scale_by_learning_rate(0.7)),
    "two learning rates": lambda tx: optax.chain(*map(hs.scale_by_learning_rate, (0.3, 0.7))),
}


@pytest.mark.parametrize("recipe", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_links_of_others_around_ours_do_not_change_our_bits(neighbour, recipe):
    make, params, rows = case(recipe)
    rows = jax.tree.map(lambda r: r[:3], rows)
    tx = NEIGHBOURS[neighbour](make(1e-3))
    assert_trees_same(run(tx, params, rows), run(tx, params, rows, compiled=False))


def test_scaled_gradients_of_16_bits_do_not_change_our_bits():
    make, params, rows = case("float32")
    rows = jax.tree.map(lambda r: r[:3].astype(jnp.bfloat16), rows)
    tx = optax.chain(optax.scale(0.3), make(1e-3))
    assert_trees_same(run(tx, params, rows), run(tx, params, rows, compiled=False))


def test_params_that_arrive_as_a_product_do_not_change_our_bits():
    _, params, rows = case("float32")
    link = hs.add_decayed_weights(0.7)

    def decayed(u, p):
        return link.update(u, link.init(p), jax.tree.map(lambda x: x * np.float32(0.3), p))[0]

    u = rows_at(rows, 0)
    assert_trees_same(jax.jit(decayed)(u, params), decayed(u, params))


def test_steps_after_a_restart_are_the_same():
    make, params, rows = case("bfloat16")
    tx = make(1e-3)
    half = run(tx, params, jax.tree.map(lambda r: r[:2], rows))
    half = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), half)
    for k in range(2, STEPS):
        half = jax.jit(functools.partial(take_step, make(1e-3)))(*half, rows_at(rows, k))
    assert_trees_same(half, op_by_op("bfloat16"))


def test_the_seed_of_the_state_counts_not_that_of_the_link():
    _, params, rows = case("bfloat16")
    tx, other = hs.adamw(1e-3, seed=1), hs.adamw(1e-3, seed=2)
    state = tx.init(params)
    row = rows_at(rows, 0)
    assert_trees_same(other.update(row, state, params), tx.update(row, state, params))


# The tests above could not fail on a machine whose compiler leaves sums alone.
@pytest.fixture(scope="module")
def a_b_c():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(10_000).astype(np.float32)) for _ in range(3)]


def test_hiding_a_product_keeps_it_from_being_fused_with_a_sum(a_b_c):
    a, b, c = a_b_c
    separate = np.asarray(a) * np.asarray(b) + np.asarray(c)
    fused = np.asarray(jax.jit(lambda a, b, c: a * b + c)(a, b, c))
    if (fused == separate).all():
        pytest.skip("this compiler does not fuse products with sums: there is nothing to hide from")
    for zero in (
        lambda a: opaque_zero(),
        lambda a: opaque_zero(jax.lax.bitcast_convert_type(a[0], jnp.uint32)),
    ):
        hidden = jax.jit(lambda a, b, c, zero=zero: opaque(a * b, zero(a)) + c)(a, b, c)
        np.testing.assert_array_equal(np.asarray(hidden), separate)
        hidden = jax.jit(lambda a, b, c, zero=zero: opaque_product(a, b, zero(a)) + c)(a, b, c)
        np.testing.assert_array_equal(np.asarray(hidden), separate)


def test_hiding_what_arrives_keeps_its_factors_from_being_gathered(a_b_c):
    x = a_b_c[0]
    separate = np.asarray(x) * np.float32(0.3) * np.float32(0.7)
    folded = np.asarray(jax.jit(lambda x: x * np.float32(0.3) * np.float32(0.7))(x))
    if (folded == separate).all():
        pytest.skip("this compiler does not gather factors: there is nothing to hide from")
    hidden = jax.jit(lambda x: opaque(x * np.float32(0.3), opaque_zero()) * np.float32(0.7))(x)
    np.testing.assert_array_equal(np.asarray(hidden), separate)


def test_a_hidden_product_is_the_product_of_numbers_of_all_sizes():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (2, 100_000), dtype=np.uint32)
    bits[:, :4] = 0, 0x80000000, 0x7F800000, 0xFFC00000
    a, b = jnp.asarray(bits.view(np.float32))
    for transform in (lambda f: f, jax.jit):
        hidden = transform(lambda a, b: opaque_product(a, b, opaque_zero()))(a, b)
        np.testing.assert_array_equal(np.asarray(hidden), np.asarray(a * b))
        np.testing.assert_array_equal(
            np.signbit(hidden) | np.isnan(hidden), np.signbit(a * b) | np.isnan(a * b)
        )


PATTERNS = [0, 1, 0x80000000, 0x80000001, 0x7F800001, 0x7FFFFFFF, 0xFF800000, 0x00400000]


@pytest.mark.parametrize("bits", PATTERNS)
def test_hiding_keeps_every_pattern(bits):
    x = jax.lax.bitcast_convert_type(jnp.uint32(bits), jnp.float32)
    hidden = jax.jit(lambda x: jax.lax.bitcast_convert_type(opaque(x, opaque_zero()), jnp.uint32))(x)
    assert int(hidden) == bits


def test_only_results_below_2_to_the_minus_101_depend_on_subnormal_numbers():
    """XLA takes them for zero on a CPU, NumPy does not (contract A8)."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-126, -90, (2, 20_000))
    g, m = (
        rng.uniform(1, 2, exponents.shape) * rng.choice([-1, 1], exponents.shape) * 2.0**exponents
    ).astype(np.float32)
    tx = hs.trace(2.0**-4)
    state = tx.init(g)._replace(trace=jnp.asarray(m))
    actual = np.asarray(jax.jit(tx.update)(jnp.asarray(g), state)[0])
    expected = g + np.float32(2.0**-4) * m
    differs = actual != expected
    assert differs.sum() > 100
    assert np.abs(expected[differs]).max() < 2.0**-101


def test_only_weights_below_2_to_the_minus_46_of_the_rate_depend_on_subnormal_numbers():
    """And weights above 2^-101 among them, because eps magnifies what a moment lost (contract A8)."""
    rng, rate, shape = np.random.default_rng(0), 2.0**-10, (2, 40_000)
    exponents = rng.integers([[-126], [-120]], [[-90], [-40]], shape)
    g, p = (rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape) * 2.0**exponents).astype(np.float32)
    tx = hs.adamw(rate, mu_dtype="float32", nu_dtype="float32", weight_decay=0.0)
    updates, _ = jax.jit(tx.update)(jnp.asarray(g), tx.init(jnp.asarray(p)), jnp.asarray(p))
    actual = np.asarray(optax.apply_updates(jnp.asarray(p), updates))
    rule = spec.ScaleByAdam(mu_dtype="float32", nu_dtype="float32")
    step, bits = spec.Step(rule, 0.0, "decoupled", "float32"), p.view(np.uint32)
    expected = step.step(bits, g, step.init(bits), "w", rate)[0].view(np.float32)
    differing = np.abs(expected[actual != expected])
    assert (differing > 2.0**-101).sum() > 100
    assert differing.max() < 2.0**-46 * rate


# --- products and sums -------------------------------------------------------------------------------------

LINKS = pathlib.Path(hs.__file__).parent


def bare_products(source: str) -> list[str]:
    """Return the sums in a source one of whose terms is a product as it stands."""

    def is_product(node):
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)

    sums = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.BinOp | ast.AugAssign))
    return [
        ast.unparse(n)
        for n in sums
        if isinstance(n.op, ast.Add | ast.Sub)
        and any(is_product(term) for term in ([n.left, n.right] if isinstance(n, ast.BinOp) else [n.value]))
    ]


@pytest.mark.parametrize(
    "path", sorted([*LINKS.glob("gradients/*.py"), *LINKS.glob("weights/*.py")]), ids=str
)
def test_nothing_on_bare_arrays_adds_a_bare_product(path):
    # Right op by op and another rounding under jit: `exact.add_product` keeps the two apart.
    assert bare_products(path.read_text()) == []


def test_a_bare_product_would_be_found():
    source = "u = g + b * m\nv -= b * m\nw = f(a * b) + c"
    assert sorted(bare_products(source)) == ["g + b * m", "v -= b * m"]
