"""State lies on a mesh as clients place it: by Optax's map_params, Flax's boxes, nnx, and state_shardings."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, take_step

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
SHAPE = (64, 512)
STORAGES = ("stochastic", "compensated", "split16", "master")
RECIPES = {
    "bfloat16": lambda: hs.adamw(1e-3),
    "fp8": lambda: hs.adamw(1e-3, mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype=hs.scaled("ufloat8_e5m3")),
    "row": lambda: hs.adamw(1e-3, nu_dtype=hs.scaled("float16", "row")),
    "whole": lambda: hs.adamw(1e-3, nu_dtype=hs.scaled("uroot8", None)),
    "tables": lambda: hs.adamw(1e-3, mu_dtype=hs.codebook("dynamic8"), nu_dtype=hs.codebook("udynamic8")),
    "store_state": lambda: hs.store_state(optax.adam(1e-3), hs.scaled("int8")),
    "lamb16": lambda: hs.lamb16(1e-3),
    **{
        f"{name}": lambda name=name: hs.adamw(1e-3, **vars(hs.recipes)[name])
        for name in ("four_bit", "one_pass")
    },
    **{storage: lambda storage=storage: hs.adamw(1e-3, param_storage=storage) for storage in STORAGES[1:]},
}


MARKED = [
    pytest.param(name, marks=() if name in ("fp8", "split16", "tables") else pytest.mark.slow)
    for name in RECIPES
]


def params():
    return {
        "dense": {"kernel": jnp.ones(SHAPE, jnp.bfloat16), "bias": jnp.ones(SHAPE[1:], jnp.bfloat16)},
        "norm": jnp.ones(SHAPE[1:], jnp.float32),
    }


SPECS = {"dense": {"kernel": P("x", "y"), "bias": P("y")}, "norm": P("y")}
SHARDINGS = jax.tree.map(lambda spec: NamedSharding(MESH, spec), SPECS)
WHOLE = NamedSharding(MESH, P())


def is_nothing(x):
    return isinstance(x, optax.MaskedNode)


def shard_bytes(tree) -> int:
    """Return the bytes that one device holds."""
    leaves = jax.tree.leaves(tree)
    return sum(np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("name", MARKED)
def test_state_shardings_cut_every_large_array(name):
    tx, p = RECIPES[name](), params()
    placed = hs.state_shardings(tx, p, SHARDINGS)
    state = jax.jit(tx.init, out_shardings=placed)(p)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, placed))
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    # An eighth, and what is short of eight parts: half of each vector, a scale of an array, counts, seeds.
    small = 4 * 2 * 3 * SHAPE[1] // 2 + 64
    assert shard_bytes(state) <= whole // 8 + small
    assert_trees_same(state, tx.init(p))


@pytest.mark.parametrize("name", MARKED)
def test_map_params_gives_shardings_as_with_optax_s_own(name):
    """With the argument that Optax documents for trees with masked leaves."""
    tx, p = RECIPES[name](), params()
    shapes = jax.eval_shape(tx.init, p)
    placed = optax.tree.map_params(
        tx, lambda _, s: s, shapes, SHARDINGS, transform_non_params=lambda _: WHOLE, is_leaf=is_nothing
    )
    state = jax.jit(tx.init, out_shardings=placed)(p)
    assert_trees_same(state, tx.init(p))


@pytest.mark.parametrize("name", ["bfloat16", "split16"])
def test_map_params_needs_no_argument_where_all_weights_are_of_16_bits(name):
    tx, p = RECIPES[name](), {"w": jnp.ones(SHAPE, jnp.bfloat16)}
    placed = optax.tree.map_params(
        tx,
        lambda _, s: s,
        jax.eval_shape(tx.init, p),
        {"w": SHARDINGS["dense"]["kernel"]},
        transform_non_params=lambda _: WHOLE,
    )
    assert_trees_same(jax.jit(tx.init, out_shardings=placed)(p), tx.init(p))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, ("x", "y"))
        x = nn.Dense(SHAPE[1], kernel_init=init, param_dtype=jnp.bfloat16)(x)
        return nn.LayerNorm(scale_init=nn.with_partitioning(nn.initializers.ones, ("y",)))(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_flax_places_a_train_state_by_its_boxes(name):
    model, x, tx = Dense(), jnp.ones((2, SHAPE[0]), jnp.bfloat16), RECIPES[name]()

    def create():
        return TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx
        )

    placed = nn.get_sharding(jax.eval_shape(create), MESH)
    state = jax.jit(create, out_shardings=placed)()
    assert state.params["Dense_0"]["kernel"].value.sharding.spec == P("x", "y")
    if name == "fp8":
        step = jax.jit(lambda s: s.apply_gradients(grads=s.params), out_shardings=placed)
        assert step(state).opt_state[0].mu["Dense_0"]["kernel"].value.sharding.spec == P("x", "y")


class Model(nnx.Module):
    def __init__(self):
        metadata = {"out_sharding": ("x", "y")}
        self.kernel = nnx.Param(jnp.ones(SHAPE, jnp.bfloat16), **metadata)
        self.norm = nnx.Param(jnp.ones(SHAPE[1:], jnp.float32), out_sharding=("y",))


@pytest.mark.parametrize("name", MARKED)
def test_nnx_places_an_optimizer_by_the_metadata_of_its_variables(name):
    tx = RECIPES[name]()

    @nnx.jit
    def create():
        model = Model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        state = nnx.state(optimizer)
        nnx.update(optimizer, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model, optimizer

    with jax.set_mesh(MESH):
        _, optimizer = create()
    kept = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == SHAPE]
    assert name in ("tables", "four_bit", "store_state") or kept
    assert all(x.sharding.spec == P("x", "y") for x in kept)


@pytest.mark.slow
def test_a_step_keeps_the_placement_and_the_bits():
    tx, p = RECIPES["fp8"](), params()
    placed = hs.state_shardings(tx, p, SHARDINGS)
    state = jax.jit(tx.init, out_shardings=placed)(jax.device_put(p, SHARDINGS))
    step = jax.jit(lambda p, s: take_step(tx, p, s, p), out_shardings=(SHARDINGS, placed))
    moved = step(jax.device_put(p, SHARDINGS), state)
    assert_trees_same(moved, jax.jit(lambda p, s: take_step(tx, p, s, p))(p, tx.init(p)))


def test_state_shardings_follow_names_and_prefixes():
    p = {"w": jnp.ones((8, 4)), "a": {"w": jnp.ones((8, 4))}, "count": jnp.ones(8)}
    rows, columns = NamedSharding(MESH, P("x")), NamedSharding(MESH, P(None, "y"))
    placed = hs.state_shardings(optax.adam(1e-3), p, {"w": rows, "a": columns, "count": rows})
    mu = placed[0].mu
    assert (mu["w"], mu["a"]["w"], mu["count"], placed[0].count) == (rows, columns, rows, WHOLE)


def test_an_array_without_a_name_does_not_claim_what_is_not_of_its_shape():
    p = jax.ShapeDtypeStruct((64, 128), "bfloat16")
    tx = optax.chain(hs.adamw(1e-3, **hs.recipes.four_bit), optax.add_noise(0.1, 0.1, 0))
    placed = hs.state_shardings(tx, p, NamedSharding(MESH, P("x")))
    shapes = jax.eval_shape(tx.init, p)
    cut = [x.shape for x, s in zip(*map(jax.tree.leaves, (shapes, placed)), strict=True) if s.spec != P()]
    assert cut == [(64, 64), (64, 128), (64, 4), (64, 1)]  # packed codes, codes, and the scales of both


def test_state_shardings_refuse_what_is_no_sharding():
    p = {"w": jnp.ones((8, 4))}
    with pytest.raises(TypeError, match=r"'w' has .* which does not say how axes are cut"):
        hs.state_shardings(optax.adam(1e-3), p, {"w": P("x")})
    with pytest.raises(ValueError, match="params and shardings are different trees"):
        hs.state_shardings(optax.adam(1e-3), p, {"v": WHOLE})
