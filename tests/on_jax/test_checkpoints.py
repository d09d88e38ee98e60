"""What a checkpoint brings back, and a run that is killed: every bit, by any road, onto any mesh."""

import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, gradients, take_step, weights

SHAPE = (64, 128)
G = {"w": gradients(1, SHAPE)[0], "norm": gradients(1, (128,))[0]}


def recipe():
    formats = {"mu_dtype": hs.codebook("dynamic4"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
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
    with pytest.raises(ValueError, match=r"due is SplitParamsState: .*loaded without its types"):
        tx.update(G, bare[1], params)
    assert_trees_same(moved, (params, state))
    assert moved[0]["w"].sharding.is_equivalent_to(placed["w"], 2)
    step = jax.jit(lambda p, s: take_step(tx, p, s, G))
    assert_trees_same(step(*moved), step(params, state))


_RUN = """
import hashlib, pathlib, pickle, sys
import jax, jax.numpy as jnp, numpy as np, optax
import halfstep_jax as hs

path, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
tx = hs.adamw(1e-2, param_storage="split8", mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype="bfloat16", seed=5)
params = {"w": jnp.full((64, 128), 0.5, jnp.bfloat16)}
k, now = 0, (params, tx.init(params))
if path.exists():
    k, now = pickle.loads(path.read_bytes())


@jax.jit
def step(params, state, k):
    g = {"w": jnp.sin(jnp.arange(64 * 128.0) * (k + 1)).reshape(64, 128)}
    updates, state = tx.update(g, state, params)
    return optax.apply_updates(params, updates), state


while k < steps:
    now = step(*now, k)
    k += 1
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps((k, jax.tree.map(np.asarray, now))))
    new.replace(path)
    print(k, flush=True)
print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(now))).hexdigest())
"""


def finished(path: pathlib.Path, script: pathlib.Path, steps: int) -> str:
    """Return the digest that a run ends with."""
    done = subprocess.run(
        [sys.executable, script, path, str(steps)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills a process by a signal")
def test_a_run_that_is_killed_thrice_ends_with_the_bits_of_an_unbroken_one(tmp_path: pathlib.Path):
    script, steps = tmp_path / "run.py", 60
    script.write_text(_RUN)
    expected = finished(tmp_path / "whole", script, steps)
    rng, broken = random.Random(7), tmp_path / "broken"
    for _ in range(3):
        with subprocess.Popen([sys.executable, script, broken, str(steps)], stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            for _ in range(rng.randrange(1, 12)):
                run.stdout.readline()
            time.sleep(rng.random() / 100)  # anywhere in a step, or in writing what it made
            run.send_signal(signal.SIGKILL)
    assert 0 < pickle.loads(broken.read_bytes())[0] < steps
    assert finished(broken, script, steps) == expected
