"""What a checkpoint brings back, and a run that is killed: every bit, by any road, onto any mesh."""

import os
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
from flax import serialization
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from halfstep_jax.checkpoint.save_state import state_file_of
from on_jax.steps import assert_trees_same, gradients, take_step, weights

SHAPE = (64, 128)
G = {"w": gradients(1, SHAPE)[0], "norm": gradients(1, (128,))[0]}


def recipe():
    formats = {"mu_dtype": hs.relative("int4", 32), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    return hs.adamw(1e-3, param_storage="split8", weight_decay=0.1, seed=2**40 + 3, **formats)


@pytest.fixture(scope="module")
def trained():
    """Return a transform, and params and state after a step: packed codes, scales, a weight that passes."""
    tx = recipe()
    params = {"w": weights(SHAPE), "norm": weights((128,), "float32")}
    return tx, *jax.jit(lambda p, s: take_step(tx, p, s, G))(params, tx.init(params))


def named(tree) -> dict:
    """Return the arrays of a tree by the keys on their paths, whatever holds them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def test_pickle_keeps_every_bit(trained):
    _, params, state = trained
    assert_trees_same(pickle.loads(pickle.dumps((params, state))), (params, state))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax: shardings are read from a file
def test_orbax_keeps_every_bit_without_a_target_and_onto_another_mesh(trained, tmp_path: pathlib.Path):
    tx, params, state = trained
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    placed = {"w": NamedSharding(mesh, P("x", "y")), "norm": NamedSharding(mesh, P("y"))}
    shardings = placed, hs.state_shardings(tx, params, placed)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), (params, state), shardings
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        bare = checkpointer.restore(tmp_path / "state")
        moved = checkpointer.restore(tmp_path / "state", target)
    assert named(bare).keys() == named((params, state)).keys()
    assert_trees_same(named(bare), named((params, state)))
    assert_trees_same(hs.float32_params(params, bare[1]), hs.float32_params(params, state))
    with pytest.raises(ValueError, match=r"expected SplitParamsState: .*loaded without its types"):
        tx.update(G, bare[1], params)
    assert_trees_same(moved, (params, state))
    assert moved[0]["w"].sharding.is_equivalent_to(placed["w"], 2)
    step = jax.jit(lambda p, s: take_step(tx, p, s, G))
    assert_trees_same(step(*moved), step(params, state))


def test_a_state_file_keeps_every_bit(trained, tmp_path: pathlib.Path):
    tx, params, state = trained
    hs.save_state(tmp_path / "run.safetensors", params, state, tx)
    like = jax.eval_shape(lambda: params)
    assert_trees_same(hs.load_state(tmp_path / "run.safetensors", like, tx), (params, state))


def test_codes_of_a_byte_are_bytes_in_a_file():
    tx, params = hs.adamw(1e-3, mu_dtype=hs.scaled("int8", min_size=0)), {"w": np.zeros(SHAPE, np.float32)}
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(tx.init, params))
    assert state_file_of("save_state", params, state, tx)[1]["mu/w"].dtype == "U8"


def test_safetensors_keeps_every_bit_by_name(trained, tmp_path: pathlib.Path):
    """Of the library itself: names and arrays. It knows no 8-bit floats of JAX, which `save_state` writes."""
    arrays = named(trained[1:])
    safetensors.flax.save_file(arrays, tmp_path / "state.safetensors")
    restored = safetensors.flax.load_file(tmp_path / "state.safetensors")
    assert_trees_same(restored, arrays)
    assert_trees_same(
        jax.tree.unflatten(jax.tree.structure(trained[1:]), [restored[x] for x in arrays]), trained[1:]
    )


def test_msgpack_keeps_every_bit(trained):
    fresh = jax.tree.map(np.zeros_like, trained[1:])
    assert_trees_same(serialization.from_bytes(fresh, serialization.to_bytes(trained[1:])), trained[1:])


def test_savez_keeps_what_it_knows_and_what_it_forgot_is_refused(tmp_path: pathlib.Path):
    """bfloat16 and 8-bit floats come back as raw bytes: refused as they are, right once they are viewed."""
    tx = hs.scale_by_adam(mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype="bfloat16")
    params = {"w": weights(SHAPE)}
    state = tx.init(params)._replace(mu={"w": params["w"].astype("float8_e4m3fn")}, nu=params)
    np.savez(tmp_path / "state.npz", **{name: np.asarray(x) for name, x in named((params, state)).items()})
    with np.load(tmp_path / "state.npz") as file:
        raw = [file[name] for name in named((params, state))]
    treedef = jax.tree.structure((params, state))
    wrong_params, wrong_state = treedef.unflatten(raw)
    with pytest.raises(
        TypeError, match=r"the weight 'w' is void16, bytes of a dtype .* x.view\(jnp.bfloat16\)"
    ):
        hs.adamw(1e-3).init(wrong_params)
    with pytest.raises(
        TypeError, match=r"the mu of 'w' is void8, bytes of a dtype that np.savez has not kept"
    ):
        tx.update(params, wrong_state)
    viewed = [x.view(y.dtype) for x, y in zip(raw, jax.tree.leaves((params, state)), strict=True)]
    assert_trees_same(treedef.unflatten(viewed), (params, state))


_ELSEWHERE = """
import sys, numpy as np, jax
from jax import export
with np.load(sys.argv[1] + ".npz") as file:
    leaves = [file[f"arr_{i}"].view(dtype) for i, dtype in enumerate(sys.argv[2:])]
step = export.deserialize(open(sys.argv[1], "rb").read())
assert not any(name.startswith(("halfstep", "optax")) for name in sys.modules)
np.savez(sys.argv[1] + ".after.npz", *(np.asarray(x) for x in step.call(leaves)))
"""


@pytest.mark.slow
def test_an_exported_step_with_8_bit_state_runs_in_a_process_that_has_jax_alone(tmp_path: pathlib.Path):
    tx = hs.adamw(1e-3, mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype=hs.scaled("ufloat8_e5m3"))
    params, g = {"w": weights(SHAPE)}, {"w": G["w"]}
    leaves, treedef = jax.tree.flatten((params, tx.init(params), g))

    @jax.jit
    def step(leaves):
        return jax.tree.leaves(take_step(tx, *treedef.unflatten(leaves)))

    path = tmp_path / "step"
    path.write_bytes(jax.export.export(step)(leaves).serialize())
    np.savez(f"{path}.npz", *map(np.asarray, leaves))
    names = [x.dtype.name for x in leaves]
    assert "float8_e4m3fn" in names
    script = "import ml_dtypes\n" + _ELSEWHERE
    subprocess.run([sys.executable, "-c", script, path, *names], check=True, timeout=300)
    with np.load(f"{path}.after.npz") as file:
        after = [file[f"arr_{i}"].view(x.dtype) for i, x in enumerate(step(leaves))]
    assert_trees_same(after, step(leaves))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills a process by a signal")
def test_a_run_that_is_killed_thrice_ends_with_the_bits_of_an_unbroken_one():
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "killed_run.py"
    arguments = [sys.executable, script, "--kills", "3", "--steps", "60"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: after 3 kills the bits are those of an unbroken run" in done.stdout


@pytest.mark.parametrize("as_structs", [False, True])
def test_a_state_file_is_read_onto_the_devices_of_the_weights(as_structs, trained, tmp_path):
    """The weight, its further bits and nu are placed as the weight is; mu is packed, and not of its shape."""
    tx, params, state = trained
    hs.save_state(tmp_path / "run", params, state, tx)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    places = {"w": NamedSharding(mesh, P("x", "y")), "norm": NamedSharding(mesh, P("y"))}
    due = jax.tree.map(jax.device_put, params, places)
    if as_structs:
        due = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, places)
    found = hs.load_state(tmp_path / "run", due, tx)
    assert_trees_same(found, (params, state))
    arrays = {path.split("/")[-1]: [] for path in named(due)}
    for path, x in named(found).items():
        leaf = path.split("/")[-1]
        if leaf in due and x.shape == due[leaf].shape:
            arrays[leaf].append(x.sharding.is_equivalent_to(places[leaf], x.ndim))
    assert arrays == {"w": [True] * 3, "norm": [True] * 3}


def test_weights_that_were_not_placed_are_read_to_the_default_device(trained, tmp_path):
    tx, params, state = trained
    hs.save_state(tmp_path / "run", params, state, tx)
    fresh = {"w": weights(SHAPE), "norm": weights((128,), "float32")}
    assert not any(x.committed for x in jax.tree.leaves(fresh))
    assert not any(x.committed for x in jax.tree.leaves(hs.load_state(tmp_path / "run", fresh, tx)))
