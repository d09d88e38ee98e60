"""Inside `jax.shard_map` a device sees its shard: told how, steps have the bits of whole arrays.

Contract: W8. Eight devices of the host, made by tests/conftest.py, in a mesh of 4 x 2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from on_jax.steps import FP8, assert_no_collectives, assert_trees_same, gradients, take_step, weights

# A matrix cut both ways; one cut along its rows over both axes, whose shards would be too small for scales; a
# kernel whose blocks run over three axes; a vector that is cut, and one that is not.
SHAPES = {"w": (16, 512), "e": (64, 96), "k": (8, 32, 3, 3), "b": (48,), "n": (48,)}
SPECS = {"w": P("x", "y"), "e": P(("y", "x")), "k": P("x"), "b": P("y"), "n": P()}
# The leaves, and the transform.
RECIPES = {
    "adamw": ("ebn", lambda: hs.adamw(1e-2, seed=3, weight_decay=0.1)),
    "fp8, split8": ("wk", lambda: hs.adamw(1e-2, param_storage="split8", **FP8)),
    "four_bit": ("we", lambda: hs.adamw(1e-2, **hs.recipes.four_bit)),
    "table": ("ek", lambda: hs.lion(1e-2, mu_dtype=hs.codebook("dynamic8", "row"))),
    "store_state": ("eb", lambda: hs.store_state(optax.yogi(1e-2), hs.scaled("int8"))),
    "accumulate": ("w", lambda: hs.accumulate_gradients(hs.sgd(1e-2, 0.9), 2)),
    "average": ("wb", lambda: hs.ema_params(0.999)),
}
MARKED = [pytest.param(name, marks=() if name == "average" else pytest.mark.slow) for name in RECIPES]


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def weights_and_gradients(names):
    params = {name: weights(SHAPES[name], seed=k) for k, name in enumerate(names)}
    return params, {name: gradients(1, SHAPES[name], "bfloat16", seed=k)[0] for k, name in enumerate(names)}


def in_shards(tx, params, specs, inside=None, **options):
    """Return the step inside `jax.shard_map`, its state placed as `state_shardings` says.

    Args:
        tx: as it is outside.
        params: the weights.
        specs: how they are cut.
        inside: the transform that steps; None: `tx`, told by `specs`.
    """
    shardings = {name: NamedSharding(mesh(), spec) for name, spec in specs.items()}
    own = jax.tree.map(lambda s: s.spec, hs.state_shardings(tx, params, shardings))
    step = functools.partial(take_step, hs.in_shard_map(tx, specs) if inside is None else inside)
    placed = {"in_specs": (specs, own, specs), "out_specs": (specs, own)}
    return jax.jit(jax.shard_map(step, mesh=mesh(), **placed, **options))


@pytest.mark.parametrize("name", MARKED)
def test_steps_in_shard_map_have_the_bits_of_whole_arrays(name):
    names, make = RECIPES[name]
    tx, (params, g) = make(), weights_and_gradients(names)
    specs = {name: SPECS[name] for name in names}
    step, expected = jax.jit(functools.partial(take_step, tx)), (params, tx.init(params))
    inside, actual = in_shards(tx, params, specs, check_vma=name != "four_bit"), expected
    inside = inside.lower(*actual, g).compile()
    assert_no_collectives(inside)
    for _ in range(2):
        expected, actual = step(*expected, g), inside(*actual, g)
    assert_trees_same(actual, expected)
    assert not (actual[0]["w" if "w" in names else "e"] == params["w" if "w" in names else "e"]).all()


def test_a_state_may_be_made_inside():
    """With the format of the whole array, for which the shard by itself would be too small."""
    tx, params, specs = hs.scale_by_adam(**FP8), {"e": weights(SHAPES["e"])}, {"e": P(("y", "x"))}
    shardings = hs.state_shardings(tx, params, {"e": NamedSharding(mesh(), specs["e"])})
    own = jax.tree.map(lambda s: s.spec, shardings)
    init = jax.shard_map(hs.in_shard_map(tx, specs).init, mesh=mesh(), in_specs=(specs,), out_specs=own)
    assert_trees_same(jax.jit(init)(params), tx.init(params))


def eight_by(specs, tx, shape=(16, 512), **options):
    """Trace a step inside `jax.shard_map`, on shapes alone."""
    params = {"w": jax.ShapeDtypeStruct(shape, "bfloat16")}
    step = lambda p: take_step(tx, p, tx.init(p), p)[0]  # noqa: E731
    cut = {"w": specs}
    return jax.eval_shape(jax.shard_map(step, mesh=mesh(), in_specs=(cut,), out_specs=cut, **options), params)


CUTS = {
    "a whole array": (P("x"), hs.scaled("float8_e4m3fn", None)),
    "a row": (P(None, "x"), hs.scaled("float8_e4m3fn", "row")),
    "a block of 128": (P(None, ("x", "y")), hs.scaled("float8_e4m3fn")),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_through_a_block_is_refused_by_name(cut):
    spec, fmt = CUTS[cut]
    for tx in (hs.scale_by_adam(mu_dtype=fmt), hs.store_state(optax.trace(0.9), fmt)):
        with pytest.raises(
            ValueError, match=r"'(0/trace/|trace/)?w' is .* of \[16, 512\], and the cut goes through"
        ):
            eight_by(spec, hs.in_shard_map(tx, {"w": spec}))


def test_an_array_of_another_shape_than_its_weight_is_refused():
    """As in a transform that keeps a number per row: how that is cut, nobody said."""
    rows = optax.GradientTransformation(
        lambda params: {"w": jnp.zeros(params["w"].shape[:1])}, lambda u, s, p=None: (u, s)
    )
    with pytest.raises(ValueError, match=r"'w' is \[2\] beside a weight that is \[2, 512\] of \[16, 512\]"):
        eight_by(P(("x", "y")), hs.in_shard_map(hs.store_state(rows, "bfloat16"), {"w": P(("x", "y"))}))


class RowSums(hs.Rule):
    """A rule that keeps a number per row."""

    scope = "parameter"
    rows = hs.moment(shape=lambda shape: shape[:1])

    def update(self, g, p, n, m, op):
        m.rows.round(op.apply(lambda x: x.sum(1), g))
        return g


def test_a_moment_of_another_shape_than_its_weight_is_refused_where_the_weight_is_cut():
    tx = hs.as_transform(RowSums())
    message = (
        r"row_sums: inside jax.shard_map 'w' is a shard, and how rows, .* is cut is not known. Step under"
    )
    with pytest.raises(ValueError, match=message):
        eight_by(P("x"), hs.in_shard_map(tx, {"w": P("x")}))
    eight_by(P(), hs.in_shard_map(tx, P()))


OF_WHOLE_ARRAYS = {
    "muon": hs.scale_by_muon(),
    "rows of muon": hs.scale_by_muon(normalize="rows"),
    "clip": hs.clip_by_block_rms(1.0),
    "scale": hs.scale_by_param_block_rms(),
}


@pytest.mark.parametrize("name", OF_WHOLE_ARRAYS)
def test_rules_of_whole_arrays_are_refused_where_a_weight_is_cut_or_may_be(name):
    tx = OF_WHOLE_ARRAYS[name]
    for cut in (P("x"), P(None, "y")):
        with pytest.raises(
            ValueError, match=r": inside jax.shard_map 'w' is (\[|a shard).* Step under jax.jit"
        ):
            eight_by(cut, hs.in_shard_map(tx, {"w": cut}))
    with pytest.raises(ValueError, match=r"inside jax.shard_map over \('x', 'y'\) 'w' may be a shard.*Say"):
        eight_by(P("x"), tx, check_vma=False)
    eight_by(P(), hs.in_shard_map(tx, P()))


def test_a_stack_of_matrices_is_cut_between_matrices():
    tx, specs = hs.scale_by_muon(reduction_axis=1, output_axis=2), {"w": P("x")}
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 6, 4)), jnp.float32)}
    whole, _ = take_step(tx, params, tx.init(params), params)
    cut, _ = in_shards(tx, params, specs)(params, tx.init(params), params)
    # Products of stacks of other sizes may be summed in another order (contract A14).
    np.testing.assert_allclose(cut["w"], whole["w"], rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"scale_by_muon: inside jax.shard_map 'w' is \[8, 3, 4\] of \[8, 6, 4\]"
    ):
        eight_by(P(None, "y"), hs.in_shard_map(tx, {"w": P(None, "y")}), (8, 6, 4))


def test_skip_nonfinite_is_told_of_the_other_shards():
    tx = hs.in_shard_map(hs.skip_nonfinite(hs.sgd(1.0)), {"w": P("x")})
    with pytest.raises(
        ValueError, match=r"skip_nonfinite: inside jax.shard_map 'w' is cut over \('x',\).*skip="
    ):
        eight_by(P("x"), tx)

    def step(g):
        bad = jnp.logical_not(jnp.isfinite(g["w"]).all()).astype(jnp.int32)
        skip = jax.lax.pmax(bad, ("x",))
        return tx.update(g, tx.init(g), g, skip=skip)[0]

    g = {"w": jnp.ones((16, 4)).at[3, 0].set(jnp.nan)}
    step = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=({"w": P("x")},), out_specs={"w": P("x")}))
    assert not step(g)["w"].any()
    assert (step({"w": jnp.ones((16, 4))})["w"] != 0).all()


NORMS = {
    "lamb": lambda axis_names: hs.lamb(1e-2, max_norm=None, axis_names=axis_names),
    "clip": lambda axis_names: hs.clip_by_global_norm(1.0, axis_names=axis_names),
}


@pytest.mark.parametrize("name", NORMS)
def test_axis_names_of_norms_must_have_the_axes_that_cut_a_weight(name):
    cut = {"w": P("x", "y")}
    with pytest.raises(
        ValueError, match=r"'w' is cut over \['y'\], and axis_names are \('x',\).*Add \['y'\]"
    ):
        eight_by(cut["w"], hs.in_shard_map(NORMS[name](("x",)), cut))
    with pytest.raises(ValueError, match=r"'w' is cut over \['x', 'y'\], and axis_names are \(\): a norm"):
        eight_by(cut["w"], hs.in_shard_map(NORMS[name](()), cut))
    eight_by(cut["w"], hs.in_shard_map(NORMS[name](("x", "y")), cut))
    eight_by(P(), hs.in_shard_map(NORMS[name](()), P()))


WORDS = {
    "a last link": hs.round_stochastically(),
    "moments": hs.scale_by_adam(),
    "scales": hs.scale_by_adam(
        mu_dtype=hs.scaled("int8"), mu_rounding="nearest_unchecked", nu_dtype="float32"
    ),
    "store_state": hs.store_state(optax.trace(0.9), hs.scaled("int8"), rounding="nearest_unchecked"),
    "a sum": hs.accumulate_gradients(optax.sgd(0.1), 2),
    "an average": hs.ema_params(0.9),
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_words_and_blocks_of_what_may_be_a_shard_are_refused(name, check_vma):
    tx = WORDS[name]
    with pytest.raises(
        ValueError, match=r"inside jax.shard_map over \('x', 'y'\) '(trace/)?w' may be a shard.*Say"
    ):
        eight_by(P("x"), tx, check_vma=check_vma)
    eight_by(P(), hs.in_shard_map(tx, P()), check_vma=check_vma)
    if check_vma:  # JAX knows that it is whole
        eight_by(P(), tx)


def test_what_needs_no_words_needs_not_be_told():
    tx = optax.chain(hs.scale_by_adam(mu_dtype="float32", nu_dtype="float32"), hs.compensate())
    eight_by(P("x", "y"), tx)
    eight_by(P("x", "y"), tx, check_vma=False)


def test_axes_that_are_not_manual_do_not_cut():
    """`jax.shard_map` over one axis of the mesh: along the other arrays are whole, wherever they lie."""
    tx, params, g = hs.round_stochastically(seed=5), *weights_and_gradients("e")
    step = functools.partial(take_step, hs.in_shard_map(tx, {"e": P("x", "y")}))
    part = jax.shard_map(
        lambda p, g: step(p, tx.init(p), g)[0],
        mesh=mesh(),
        in_specs=(P("x"),) * 2,
        out_specs=P("x"),
        axis_names={"x"},
    )
    assert_trees_same(
        jax.jit(part)(params, g), jax.jit(functools.partial(take_step, tx))(params, tx.init(params), g)[0]
    )


def test_outside_it_changes_nothing():
    tx, params, g = hs.adamw(1e-2), *weights_and_gradients("b")
    told = hs.in_shard_map(tx, SPECS)
    programs = [
        str(jax.make_jaxpr(functools.partial(take_step, x))(params, x.init(params), g)) for x in (told, tx)
    ]
    assert programs[0] == programs[1]


def test_specs_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"in_shard_map: specs holds 'x', which does not say.*PartitionSpec"):
        hs.in_shard_map(hs.adamw(1e-3), {"w": "x"})
    with pytest.raises(ValueError, match=r"in_shard_map: params and specs are different trees"):
        eight_by(P("x"), hs.in_shard_map(hs.adamw(1e-3), {"v": P("x")}))
    with pytest.raises(ValueError, match=r"in_shard_map: the spec of 'w' is .*, its shape \(4, 512\)"):
        eight_by(P("x"), hs.in_shard_map(hs.adamw(1e-3), {"w": P("x", None, "y")}))


def test_weights_that_differ_by_device_are_named_once_and_may_have_seeds(caplog):
    params = {"q": jnp.ones((4, 1000), jnp.bfloat16)}

    def inside(params):
        params = {"q": params["q"][0]}
        seed = jnp.stack([jnp.uint32(0), jax.lax.axis_index("x").astype(jnp.uint32)])
        tx = hs.in_shard_map(hs.adamw(1e-2, seed=seed), P())
        return take_step(tx, params, tx.init(params), params)[0]["q"][None]

    step = jax.shard_map(inside, mesh=mesh(), in_specs=({"q": P("x")},), out_specs=P("x"))
    members = jax.jit(step)(params)
    assert [r.getMessage().split(". ")[0] for r in caplog.records] == [
        "in_shard_map: specs say that devices along ('x',) have the same 'q', and it may differ"
    ]
    tx, alone = hs.adamw(1e-2, seed=2), {"q": params["q"][2]}
    np.testing.assert_array_equal(members[2], take_step(tx, alone, tx.init(alone), alone)[0]["q"])
    assert (members[0] != members[1]).any()
