"""Steps over eight devices give the bits of one device, keep every array where it is, and send nothing.

Contract: W8. The eight devices are the host's, made by tests/conftest.py.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from on_jax.steps import (
    FOUR,
    assert_no_collectives,
    assert_trees_same,
    gradients,
    run,
    sharded,
    take_step,
    weights,
)

SHAPE = (16, 24)
LAYOUTS = [("x", "y"), (("x", "y"), None), (None, "x")]
LAYOUTS += [
    pytest.param(axes, marks=pytest.mark.slow) for axes in (("y", "x"), (None, ("y", "x")), (None, None))
]


def recipe():
    return hs.adamw(
        1e-3, weight_decay=0.1, seed=3, nu_dtype="bfloat16", mu_dtype="float16", mu_rounding="stochastic"
    )


@functools.cache
def on_one_device(param_dtype):
    return run(recipe(), {"w": weights(SHAPE, param_dtype)}, {"w": gradients(3, SHAPE)})


@pytest.mark.slow
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_sharded_steps_give_the_bits_of_one_device(param_dtype, axes):
    tx = recipe()
    params = {"w": sharded(weights(SHAPE, param_dtype), *axes)}
    state = tx.init(params)
    step = jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1))
    for g in gradients(3, SHAPE):
        params, state = step(params, state, {"w": sharded(g, *axes)})
    assert params["w"].sharding.is_equivalent_to(sharded(np.zeros(SHAPE), *axes).sharding, 2)
    assert_trees_same((params, state), on_one_device(param_dtype))


def test_moments_are_born_where_the_params_are():
    params = {"w": sharded(weights(SHAPE), "x", "y"), "b": sharded(weights((8,)), "x")}
    state = recipe().init(params)[0]
    for moment in (state.mu, state.nu):
        for name, p in params.items():
            assert moment[name].sharding.is_equivalent_to(p.sharding, p.ndim)


@pytest.mark.parametrize("axes", [("x", "y"), (("x", "y"), None)], ids=str)
def test_a_sharded_step_sends_nothing(axes):
    tx = recipe()
    params, g = ({"w": sharded(weights(SHAPE), *axes)} for _ in range(2))
    state = tx.init(params)
    assert_no_collectives(jax.jit(functools.partial(take_step, tx)).lower(params, state, g).compile())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("x", "y"), (("x", "y"), None)], ids=str)
def test_muon_over_devices_steps_within_the_bound_of_one_and_stays_sharded(axes):
    """Momentum has its bits; the factor, of 16 rows, may be apart by the bound of contract A14."""
    tx = optax.chain(hs.scale_by_muon(mu_dtype="bfloat16"), hs.scale_by_learning_rate(1.0))
    ((gradient,), params) = gradients(1, SHAPE), weights(SHAPE, "float32")
    step = jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1))
    alone, state = step({"w": params}, tx.init({"w": params}), {"w": gradient})
    placed = {"w": sharded(weights(SHAPE, "float32"), *axes)}
    several, state_of_several = step(placed, tx.init(placed), {"w": sharded(gradient, *axes)})
    assert several["w"].sharding.is_equivalent_to(sharded(gradient, *axes).sharding, 2)
    momenta = optax.tree.get(state_of_several, "mu")["w"], optax.tree.get(state, "mu")["w"]
    assert momenta[0].sharding.is_equivalent_to(several["w"].sharding, 2)
    assert_trees_same(*momenta)
    factor = np.asarray(alone["w"]) - np.asarray(weights(SHAPE, "float32"))
    apart = np.linalg.norm(np.asarray(several["w"]) - np.asarray(alone["w"]))
    assert apart <= 485 * 10 * 2.0**-24 * 4 * np.linalg.norm(factor) + 2.0**-23 * np.linalg.norm(alone["w"])


def test_explicit_mesh_axes_keep_their_types():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    place = NamedSharding(mesh, P("x", "y"))
    tx = recipe()
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(weights(SHAPE), place)}
        state = jax.jit(tx.init)(params)
        assert jax.typeof(state[0].mu["w"]).sharding == jax.typeof(params["w"]).sharding
        step = jax.jit(functools.partial(take_step, tx))
        for g in gradients(3, SHAPE):
            params, state = step(params, state, {"w": jax.device_put(g, place)})
            assert jax.typeof(state[0].nu["w"]).sharding == jax.typeof(params["w"]).sharding
        assert params["w"].sharding.spec == P("x", "y")
    assert_trees_same((params, state), on_one_device("bfloat16"))


def test_init_takes_shapes_alone():
    params = {"w": weights((64, 65)), "b": weights(())}
    shapes = jax.eval_shape(lambda: params)
    for tx in (recipe(), hs.adamw(1e-3, **FOUR)):
        due = jax.tree.map(lambda x: (x.shape, x.dtype), tx.init(params))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(tx.init, shapes)) == due
        assert_trees_same(tx.init(shapes), tx.init(params))


@pytest.mark.slow
def test_apply_updates_over_devices_gives_the_bits_of_one():
    p, u = weights(SHAPE), gradients(1, SHAPE)[0] * 1e-3
    apply = jax.jit(functools.partial(hs.apply_updates, seed=4, step=2))
    whole = apply({"w": p}, {"w": u})
    parts = apply({"w": sharded(p, "x", "y")}, {"w": sharded(u, "x", "y")})
    assert_trees_same(parts, whole)
    assert_trees_same(
        optax.tree.cast(parts, jnp.float32),
        optax.tree.cast(hs.apply_updates({"w": p}, {"w": u}, 4, 2), jnp.float32),
    )


EXPLICIT = {
    "fp8": lambda: hs.adamw(
        1e-3, mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype=hs.scaled("ufloat8_e5m3"), seed=3
    ),
    "four_bit": lambda: hs.adamw(1e-3, **hs.recipes.four_bit),
    "tables": lambda: hs.adamw(1e-3, mu_dtype=hs.codebook("dynamic8"), nu_dtype=hs.codebook("udynamic8")),
    "cut": lambda: hs.adamw(1e-3, mu_dtype=hs.scaled("int8", 100), nu_dtype=hs.scaled("ufloat8_e5m3", None)),
    "store_state": lambda: hs.store_state(optax.adam(1e-3), hs.scaled("int8")),
    "lamb16": lambda: hs.lamb16(1e-3),
    "clip": lambda: optax.chain(hs.clip_by_global_norm(1.0, exact=True), hs.sgd(0.1)),
}


WHOLE = {
    "muon": lambda: hs.muon(1e-2, normalize="rows"),
    "adafactor": lambda: hs.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=16),
}


@pytest.mark.parametrize(
    ("name", "cut", "named"),
    [
        ("muon", P(None, "x"), False),
        ("adafactor", P("x"), True),
        pytest.param("muon", P("x"), True, marks=pytest.mark.slow),
        pytest.param("adafactor", P(None, "x"), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rules_of_whole_arrays_have_the_bits_of_one_device_on_explicit_axes(name, cut, named):
    """The mesh is that of the arrays, whether `jax.set_mesh` names it or not."""
    tx, size = WHOLE[name](), (32, 64)
    params, rows = {"w": weights(size)}, {"w": gradients(2, size)}
    expected = run(tx, params, rows)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh) if named else contextlib.nullcontext():
        placed = jax.device_put(params, {"w": NamedSharding(mesh, cut)})
        after = run(tx, placed, jax.device_put(rows, NamedSharding(mesh, P(None, *cut))))
    assert after[0]["w"].sharding.spec == P(*cut, *(None,) * (2 - len(cut)))
    assert_trees_same(after, expected)


EXHAUSTIVE = ("tables", "store_state", "clip")


def speed(name):
    """Return the marks of a format; each is seconds of compiling."""
    if name == "fp8":
        return ()
    return pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=speed(name)) for name in EXPLICIT])
def test_explicit_mesh_axes_serve_every_format(name):
    """On a mesh of explicit axes blocks are cut as on any other: same bits, same placement, nothing sent."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    tx, size = EXPLICIT[name](), (64, 512)
    params, g = {"w": weights(size)}, {"w": gradients(1, size)[0]}
    step = functools.partial(take_step, tx)
    expected = jax.jit(step)(params, tx.init(params), g)
    with jax.set_mesh(mesh):
        placed, g = (jax.device_put(x, {"w": NamedSharding(mesh, P("x", "y"))}) for x in (params, g))
        state = tx.init(placed)
        compiled = jax.jit(step).lower(placed, state, g).compile()
        after = compiled(placed, state, g)
    assert_trees_same(after, expected)
    assert after[0]["w"].sharding.spec == P("x", "y")
    # Norms, and blocks that the mesh cuts, take what is on other devices.
    if name not in ("cut", "lamb16", "clip"):
        assert_no_collectives(compiled)


NORMS = {
    "clip": lambda **axes: hs.clip_by_global_norm(1e-3, **axes),
    "exact clip": lambda **axes: hs.clip_by_global_norm(1e-3, exact=True, **axes),
    "lamb": lambda **axes: hs.lamb(1e-2, mu_dtype="float32", nu_dtype="float32", **axes),
    "lamb16": lambda **axes: hs.lamb16(1e-2, mu_dtype="float32", nu_dtype="float32", **axes),
}


def in_shards(tx, params, gradient, specs, **options):
    """Return the updates of a first step that is taken inside `jax.shard_map`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))

    def step(params, gradient):
        return tx.update(gradient, tx.init(params), params)[0]

    shard_map = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs, **options)
    return jax.jit(shard_map)(params, gradient)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "name", ["clip", *(pytest.param(n, marks=pytest.mark.slow) for n in list(NORMS)[1:])]
)
def test_norms_in_shard_map_are_those_of_whole_arrays(name, check_vma):
    params = {"w": weights((16, 24), "float32"), "v": weights((8, 24), "float32", seed=2)}
    g = {"w": gradients(1, (16, 24))[0], "v": gradients(1, (8, 24), seed=3)[0]}
    specs = {"w": P("x", "y"), "v": P("x", "y")}
    if check_vma:  # JAX then knows that every device has all of this one
        params["b"], g["b"], specs["b"] = weights(24, "float32"), gradients(1, 24)[0], P()
    tx = NORMS[name](axis_names=("x", "y"))
    expected = jax.jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, g)
    updates = in_shards(tx, params, g, specs, check_vma=check_vma)
    if name == "exact clip":
        assert_trees_same(updates, expected)
    # Sums of 384 squares in two orders differ by 386 ulps at most, in fact by far fewer: a bound of 16.
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=16 * 2.0**-23)


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_norms_in_shard_map_without_axis_names_are_refused(name):
    p = {"w": weights((16, 24), "float32")}
    with pytest.raises(ValueError, match=r"inside jax.shard_map over \('x', 'y'\) a norm would be "):
        in_shards(NORMS[name](), p, p, {"w": P("x", "y")})
    whole = in_shards(NORMS[name](axis_names=()), p, p, {"w": P()})
    assert_trees_same(whole, in_shards(NORMS[name](axis_names=("x", "y")), p, p, {"w": P()}))
