"""Two processes, each with two devices of one mesh, give the bits of one: words, scales, an exact norm."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

_STEPS = """
import hashlib, sys
import jax

rank, port = int(sys.argv[1]), sys.argv[2]
if rank >= 0:
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import halfstep_jax as hs

formats = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
tx = optax.chain(hs.clip_by_global_norm(1.0, exact=True), hs.adamw(1e-2, seed=5, **formats))
p = np.random.default_rng(0).standard_normal((64, 256)).astype(jnp.bfloat16)
g = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
place = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
params, gradient = (
    {"w": jax.make_array_from_callback(x.shape, place, lambda index, x=x: x[index])} for x in (p, g)
)
state = jax.jit(tx.init, out_shardings=hs.state_shardings(tx, params, {"w": place}))(params)


@jax.jit
def step(params, state, gradient):
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


for _ in range(2):
    params, state = step(params, state, gradient)
whole = multihost_utils.process_allgather((params, state), tiled=True) if rank >= 0 else (params, state)
digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(whole))).hexdigest()
print(jax.process_count(), len(jax.devices()), digest)
"""


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path: pathlib.Path):
    script = tmp_path / "steps.py"
    script.write_text(_STEPS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}

    def start(rank: int) -> subprocess.Popen:
        command = [sys.executable, script, str(rank), port]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    runs = [start(0), start(1)]
    results = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    alone = start(-1)
    out, err = alone.communicate(timeout=300)
    assert alone.returncode == 0, err
    processes, devices, digest = out.split()[-3:]
    assert (processes, devices) == ("1", "2")
    assert [result[0].split()[-3:] for result in results] == [["2", "4", digest]] * 2
