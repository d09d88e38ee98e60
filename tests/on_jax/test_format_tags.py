"""A state in codes has a tag of its formats: codes of one recipe are never read as codes of another."""

import functools
import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, gradients, run, take_step, weights

SHAPE = (16, 32)
P, G = {"w": weights(SHAPE)}, {"w": gradients(3, SHAPE)}
BYTES = {"mu_dtype": hs.relative("float8_e3m4"), "nu_dtype": "uroot4_e4m4"}
ADAM = optax.adam(1e-2, mu_dtype="float32")
MAKE = {
    "one_pass": lambda: hs.adamw(1e-2, recipe="one_pass"),
    "other bytes": lambda: hs.adamw(1e-2, **BYTES),
    "default": lambda: hs.adamw(1e-2),
    "split8": lambda: hs.adamw(1e-2, param_storage="split8"),
    "split16": lambda: hs.adamw(1e-2, param_storage="split16"),
    "stored": lambda: hs.store_state(ADAM, "ufloat16_e7m9", select=lambda name, _: "nu" in name),
    "sixteen": lambda: hs.store_state(ADAM, "bfloat16", select=lambda name, _: "nu" in name),
}
PAIRS = [
    ("one_pass", "other bytes"),
    ("other bytes", "one_pass"),
    ("one_pass", "default"),
    ("default", "one_pass"),
    ("split8", "split16"),
    ("split16", "split8"),
    ("stored", "sixteen"),
    ("sixteen", "stored"),
]
ANOTHER = "it is of another recipe. Restore with the transform of the run that saved it"


def trained(name: str):
    """Return the transform of a name, and params and state after three steps."""
    return MAKE[name](), *run(MAKE[name](), P, G)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs")
    with ocp.StandardCheckpointer() as checkpointer:
        for name in MAKE:
            checkpointer.save(folder / name, trained(name)[2])
            checkpointer.wait_until_finished()
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax: shardings are read from a file
@pytest.mark.parametrize("name", MAKE)
def test_orbax_restores_within_a_recipe(name, saved):
    tx, params, state = trained(name)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved / name, jax.eval_shape(tx.init, P))
    assert_trees_same(restored, state)
    hs.describe(tx, params, restored)
    assert_trees_same(take_step(tx, params, restored, P), take_step(tx, params, state, P))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_orbax_refuses_a_state_of_another_recipe(name, other, saved):
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match=r"(?is)match.*formats"):
        checkpointer.restore(saved / name, jax.eval_shape(MAKE[other]().init, P))


@pytest.mark.parametrize("name", MAKE)
def test_msgpack_restores_within_a_recipe_and_refuses_others(name):
    tx, params, state = trained(name)
    data = serialization.to_bytes(state)
    restored = serialization.from_bytes(tx.init(P), data)
    assert_trees_same(restored, state)
    assert_trees_same(take_step(tx, params, restored, P), take_step(tx, params, state, P))
    for _, other in (pair for pair in PAIRS if pair[0] == name):
        with pytest.raises(ValueError, match=r"do not match.*formats"):
            serialization.from_bytes(MAKE[other]().init(P), data)


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_a_step_refuses_a_state_of_another_recipe_also_where_it_is_traced(name, other):
    """As the state is after an `orbax` restore with `partial_restore`, or a cast by hand."""
    tx, state = MAKE[other](), trained(name)[2]
    cast = _cast(state, jax.eval_shape(tx.init, P))
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=ANOTHER):
            update(P, cast, P)


def _cast(state, like):
    """Return a state in the dtypes of another, with its own tags."""
    if hasattr(state, "_fields"):
        fields = {x: _cast(getattr(state, x), getattr(like, x)) for x in state._fields if x != "formats"}
        return state._replace(**fields)
    if isinstance(state, tuple):
        return tuple(map(_cast, state, like))
    return jax.tree.map(lambda x, y: x.astype(y.dtype), state, like)


def _by_order(tmp_path: pathlib.Path):
    """Return a transform, and a state of another in it: equinox goes by the order of leaves."""
    tx, (_, params, state) = MAKE["other bytes"](), trained("one_pass")
    eqx.tree_serialise_leaves(tmp_path / "run.eqx", state)
    return tx, params, eqx.tree_deserialise_leaves(tmp_path / "run.eqx", tx.init(P))


READERS = {
    "update": lambda tx, params, state: tx.update(P, state, params),
    "describe": hs.describe,
    "diagnose": lambda tx, params, state: hs.diagnose(tx, params, P, state),
    "Monitor": lambda tx, params, state: [*map(hs.Monitor(tx, 1).read, [params] * 2, [state] * 2)],
    "save_state": lambda tx, params, state: hs.save_state(tempfile.mkdtemp() + "/run", params, state, tx),
    "float32_params": lambda tx, params, state: hs.float32_params(params, state),
    "to_optax": lambda tx, params, state: hs.to_optax(state, tx, params, optax.adamw(1e-2)),
}


@pytest.mark.parametrize("reader", READERS)
def test_leaves_that_were_put_into_another_recipe_by_their_order_are_found(reader, tmp_path):
    """A traced step cannot see it: the check after a restore is `describe`."""
    tx, params, state = _by_order(tmp_path)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(P))
    with pytest.raises(ValueError, match=r"the tag mu_relative_float8_e3m4-nu_uroot4_e4m4 .* by their order"):
        READERS[reader](tx, params, state)


@pytest.mark.parametrize("reader", ["describe", "diagnose", "Monitor", "save_state", "to_optax"])
def test_readers_that_have_the_transform_refuse_the_state_of_another(reader):
    _, params, state = trained("one_pass")
    with pytest.raises(ValueError, match=ANOTHER):
        READERS[reader](MAKE["other bytes"](), params, state)


def test_the_remedy_changes_the_recipe():
    old, params, state = trained("one_pass")
    wide = hs.to_optax(state, old, params, optax.adamw(1e-2))
    new = MAKE["other bytes"]()
    moved = hs.from_optax(wide, new, params)
    hs.describe(new, params, moved)
    u, v = (tx.update(P, s, params)[0]["w"] for tx, s in ((old, state), (new, moved)))
    # Two formats of 8 bits: mu is off by at most 2^-5, nu by 2^-3 and its root by half of that.
    np.testing.assert_allclose(jnp.vdot(u, v) / jnp.vdot(u, u), 1, atol=0.1)


def test_the_remedy_changes_the_storage_of_weights():
    _, params, state = trained("split16")
    new = MAKE["split8"]()
    shown, after = hs.set_float32_params(params, new.init(params), hs.float32_params(params, state))
    gap = np.abs(hs.float32_params(shown, after)["w"] - hs.float32_params(params, state)["w"])
    assert float((gap / np.abs(params["w"].astype(jnp.float32))).max()) <= 2.0**-16  # half a gap of 16 bits
    new.update(P, after, shown)


WRAPPED = {
    "jit": lambda tx: tx,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "inject": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=1.0),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"a": tx}, {"w": "a"}),
    "flatten": optax.flatten,
    "skip_nonfinite": hs.skip_nonfinite,
    "accumulate": lambda tx: hs.accumulate_gradients(tx, 2),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_tag_passes_through_wrappers_scan_and_donation(name):
    tx = WRAPPED[name](hs.scale_by_adam(**BYTES))
    state = jax.jit(tx.init)(P)
    first = _tags(state)

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(state):
        return jax.lax.scan(lambda s, g: (tx.update(g, s, P)[1], None), state, G)[0]

    assert _tags(steps(steps(state))) == first == [("mu_relative_float8_e3m4-nu_uroot4_e4m4", 4)]


def test_members_of_a_vmap_have_a_tag_each_which_is_checked():
    tx = hs.scale_by_adam(**BYTES)
    params = {"w": jnp.stack([P["w"]] * 3)}
    words = jnp.array([[0, 1], [2, 0], [0, 3]], jnp.uint32)
    state = jax.vmap(lambda p, seed: hs.scale_by_adam(**BYTES).init(p))(params, words)
    state = jax.vmap(tx.update)(params, state)[1]
    assert _tags(state) == [("mu_relative_float8_e3m4-nu_uroot4_e4m4", 12)]
    one = jax.tree.map(lambda x: x[1], state)
    tx.update(P, one)


def test_zeros_in_place_of_a_state_are_a_state():
    tx = MAKE["one_pass"]()
    zeros = jax.tree.map(jnp.zeros_like, tx.init(P))
    assert_trees_same(tx.update(P, zeros, P)[0], tx.update(P, tx.init(P), P)[0])


def test_numbers_have_no_tag_as_a_cast_keeps_them():
    formats = [dict(mu_dtype=x, nu_dtype=y) for x, y in (("float32", "bfloat16"), ("bfloat16", "float32"))]
    for tx in (
        hs.adamw(1e-2),
        hs.adamw(1e-2, param_storage="master"),
        *(hs.adam(1e-2, **x) for x in formats),
    ):
        assert _tags(tx.init(P)) == []


def _tags(state) -> list[tuple[str, int]]:
    """Return the tags in a state, and their bytes."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    at = jax.tree_util.GetAttrKey("formats")
    return [(path[-1].key, x.nbytes) for path, x in paths if at in path]
