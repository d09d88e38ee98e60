"""Trees of another kind, recipe or dtype are refused and named; nothing is half-applied."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import G, assert_trees_same, gradients, run, update, weights


@pytest.mark.parametrize(
    ("other", "leaf"),
    [
        ({"v": jnp.ones(3)}, r"'v' is in updates alone"),
        ([jnp.ones(3)], r"'0' is in updates alone"),
        ({"w": {"x": jnp.ones(3)}}, r"'w/x' is in updates alone"),
        ({}, r"'w' is in the (state|weight)s alone"),
    ],
)
def test_updates_of_another_tree_are_refused_and_the_leaf_is_named(other, leaf):
    message = rf"updates and (state|weight)s are different trees: {leaf}\. Pass the [\w ]*\.$"
    for tx in (hs.scale_by_adam(), hs.add_decayed_weights(0.1), hs.round_stochastically()):
        with pytest.raises(ValueError, match=message):
            update(tx, other)


def test_trees_of_other_containers_are_told_without_their_arrays():
    tx, params = hs.scale_by_adam(), [jnp.zeros(3, jnp.bfloat16)]
    with pytest.raises(ValueError, match=r"different trees: Expected tuple\. Pass the tree that init saw\.$"):
        tx.update((jnp.ones(3),), tx.init(params), params)


BAD_UPDATES = [
    {"a": jnp.ones(3), "b": jnp.ones(2, jnp.int32)},
    {"a": jnp.ones(3), "b": jnp.ones(5)},
    {"a": jnp.ones(3)},
]


@pytest.mark.parametrize("updates", BAD_UPDATES, ids=["dtype", "shape", "tree"])
@pytest.mark.parametrize("compiled", [True, False])
def test_nothing_is_half_applied(updates, compiled):
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
    tx = hs.adamw(1e-3)
    good = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    _, state = jax.jit(tx.update)(good, tx.init(params), params)
    before = jax.tree.map(np.array, (params, state))
    with pytest.raises((TypeError, ValueError), match="scale_by_adam: "):
        (jax.jit(tx.update) if compiled else tx.update)(updates, state, params)
    assert_trees_same((params, state), before)
    jax.jit(tx.update)(good, state, params)


def test_a_traced_hyperparameter_is_not_read():
    step = jax.jit(lambda b1: update(hs.scale_by_adam(b1=b1, mu_rounding="nearest"), G)[0])
    assert bool(jnp.isfinite(step(jnp.float32(0.9))["w"]).all())
    with pytest.raises(TypeError, match="b1 is a float16 array"):
        step(jnp.float16(0.9))


RECIPES = {
    "default": hs.scale_by_adam(),
    "eight_bit": hs.scale_by_adam(**hs.recipes.eight_bit),
    "four_bit": hs.scale_by_adam(**hs.recipes.four_bit),
    "fp8": hs.scale_by_adam(mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype=hs.scaled("ufloat8_e5m3")),
    "lion": hs.scale_by_lion(),
    "trace": hs.trace(0.9),
    "split_params": hs.split_params(hs.scale_by_adam()),
    "store_state": hs.store_state(optax.scale_by_adam(), "bfloat16"),
    "accumulate_gradients": hs.accumulate_gradients(optax.sgd(0.1), 2),
    "ema_params": hs.ema_params(0.9),
    "skip_nonfinite": hs.skip_nonfinite(hs.scale_by_adam()),
}


P16 = {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}


@pytest.mark.parametrize("own", RECIPES)
def test_a_state_of_another_recipe_is_refused_and_named(own):
    """By the class of the state, its tag, or the dtype in which the other recipe keeps a moment."""
    for other in RECIPES.keys() - {own}:
        state = jax.eval_shape(RECIPES[other].init, P16)
        with pytest.raises(
            (ValueError, TypeError), match=r"expected \w+State|(mu|nu) of 'w'|the state has .* keeps .*recipe"
        ):
            jax.eval_shape(RECIPES[own].update, P16, state, P16)
    with pytest.raises(ValueError, match="the state is an array, expected"):
        jax.eval_shape(RECIPES[own].update, P16, P16["w"], P16)


def _bf16():
    return {"w": jnp.ones((64, 128), jnp.bfloat16)}


def _cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype in (jnp.bfloat16, jnp.float32) else x, tree)


@pytest.mark.parametrize("make", [hs.adam, hs.adamw, hs.lamb, hs.lion])
@pytest.mark.parametrize("kept", ["float16", "float32"])
def test_a_state_that_was_cast_is_refused(make, kept):
    params, tx = _bf16(), make(1e-2)
    state = tx.init(params)
    moments = state[0]._replace(mu=_cast(state[0].mu, kept))
    with pytest.raises(TypeError, match=rf"the mu of 'w' is {kept}, .* mu_dtype=None"):
        jax.jit(tx.update)(params, (moments, *state[1:]), params)


def test_moments_of_another_dtype_may_be_asked_for():
    params, tx = _bf16(), hs.scale_by_adam(mu_dtype="float32", nu_dtype="float32")
    tx.update(params, hs.scale_by_adam().init(_cast(params, "float32")), params)


@pytest.mark.parametrize("recipe", [{}, hs.recipes.one_pass, hs.recipes.eight_bit], ids=["default", "1", "8"])
@pytest.mark.parametrize(("before", "now"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_weights_that_were_cast_since_init_are_refused(recipe, before, now):
    """As eqx.apply_updates casts those of 16 bits."""
    tx = hs.adamw(1e-3, **recipe)
    state, params = tx.init(_cast(_bf16(), before)), _cast(_bf16(), now)
    with pytest.raises((TypeError, ValueError), match=r"eqx\.apply_updates does not"):
        jax.jit(tx.update)(params, state, params)
    if recipe:
        params, state = hs.set_float32_params(params, state, _cast(params, "float32"))
        tx.update(params, state, params)


def test_a_random_key_among_the_weights_is_named():
    with pytest.raises(TypeError, match=r"scale_by_adam: the weight 'k' is key<fry>; weights are"):
        hs.adamw(1e-3).init({"k": jax.random.key(0)})


def test_a_mask_of_another_tree_is_named():
    message = "add_decayed_weights: params and mask are different trees: 'v' is in mask alone. Pass mask of"
    with pytest.raises(ValueError, match=message):
        hs.adamw(1e-3, mask={"v": True}).init(_bf16())


MAPS = {
    "mean": lambda state: jax.tree.map(lambda a, b: (a + b) / 2, state, state),
    "cast": lambda state: optax.tree.cast(state, jnp.bfloat16),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: hs.adamw(1e-3),
        lambda: hs.adamw(1e-3, recipe="eight_bit", param_storage="split8"),
        lambda: hs.sgd(1e-3),
        lambda: hs.store_state(optax.adam(1e-3), "bfloat16"),
        lambda: hs.accumulate_gradients(optax.sgd(1e-3), 2),
        lambda: hs.ema_params(0.9),
    ],
)
def test_a_map_over_a_whole_state_is_refused_by_the_leaf(make, name):
    params, tx = _bf16(), make()
    with pytest.raises(TypeError, match=r"seed in \w+ is (float32|bfloat16), and init made it uint32"):
        tx.update(params, MAPS[name](tx.init(params)), params)


def test_moments_are_averaged_in_the_form_of_optax():
    params, tx, like = _bf16(), hs.adamw(1e-3, recipe="eight_bit"), optax.adamw(1e-3)
    _, state = tx.update(params, tx.init(params), params)
    in_optax = hs.to_optax(state, tx, params, like)
    mean = hs.from_optax(jax.tree.map(lambda a, b: (a + b) / 2, in_optax, in_optax), tx, params)
    assert_trees_same(mean[0].mu, state[0].mu)
    assert mean[0].count == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: hs.adamw(1e-3, recipe="eight_bit"),
        lambda: hs.sgd(1e-3),
        lambda: hs.store_state(optax.adam(1e-3), "bfloat16"),
    ],
)
def test_symbolic_dimensions_are_refused_by_name(make):
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(TypeError, match=r"the shape of 'w' is \(n, 128\), with symbolic dimensions"):
        jax.eval_shape(make().init, {"w": jax.ShapeDtypeStruct((n, 128), jnp.bfloat16)})


def test_trees_that_differ_in_a_static_field_are_told_without_their_arrays():
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["shape"])
    @dataclasses.dataclass
    class Model:
        w: jax.Array
        shape: tuple

    one, other = Model(jnp.ones(3), (3,)), Model(jnp.ones(3), (4,))
    tx = hs.adamw(1e-3)
    with pytest.raises(
        ValueError, match=r"data: .* != .* Pass the params that the updates are for"
    ) as caught:
        tx.update(one, tx.init(one), other)
    assert "Array" not in str(caught.value)


MOVED = {
    "eight_bit": ("nu", lambda: hs.adamw(1e-3, recipe="eight_bit")),
    "four_bit": ("mu", lambda: hs.adamw(1e-3, recipe="four_bit")),
    "int8": ("mu", lambda: hs.lion(1e-3, mu_dtype=hs.scaled("int8", 32, scale="fine"))),
}


@pytest.mark.parametrize("size", [0.1, 1e-14, 1e-22])
@pytest.mark.parametrize("name", MOVED)
def test_moments_that_were_moved_without_their_scales_are_refused(name, size):
    """Of numbers so small that scales are the lowest, states are taken: no state is refused that is right."""
    moment, make = MOVED[name]
    tx, g = make(), size * gradients(2, (64, 128))
    params, state = run(tx, {"w": weights((64, 128))}, {"w": g})
    moved = {"v": params["w"]}
    fields = {x for x in ("mu", "nu") if x in state[0]._fields}
    values = {x: {"v": getattr(state[0], x)["w"]} for x in fields}
    scales = {x: getattr(state[0], x) for x in (f"{field}_scale" for field in fields)}
    scales = {name: {"v": x["w"]} for name, x in scales.items() if isinstance(x, dict)}
    alone = optax.tree.set(tx.init(moved), count=state[0].count, **values)
    if size == 0.1:
        with pytest.raises(
            ValueError, match=rf"the {moment} of 'v' has codes, and its {moment}_scale is that"
        ):
            tx.update({"v": g[0]}, alone, moved)
    tx.update({"v": g[0]}, optax.tree.set(alone, **scales), moved)
