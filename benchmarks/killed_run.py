"""A run that is killed again and again ends with the bits of one that never was.

    python benchmarks/killed_run.py

takes 400 AdamW steps with 8-bit moments and split weights, and writes its state file after every step. Then
the same run is killed 20 times by SIGKILL, while it starts, steps or writes. Each time it goes on from the
file that it finds. The script fails if the two runs do not end with the same bytes of weights and state. It
also fails if a kill left a file that cannot be read.
"""

import argparse
import hashlib
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

STEPS, KILLS = 400, 20


def train(path: pathlib.Path, steps: int) -> str:
    """Go on from a state file, if there is one, to the given step; return a digest of weights and state."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import halfstep_jax as hs

    tx = hs.adamw(1e-2, param_storage="split8", seed=5, **hs.recipes.eight_bit)
    params = {"w": jnp.full((64, 128), 0.5, jnp.bfloat16), "norm": jnp.ones(128)}
    now = hs.load_state(path, params, tx) if path.exists() else (params, tx.init(params))

    @jax.jit
    def step(params, state, k):
        angles = jnp.arange(64 * 128.0).reshape(64, 128) * (k + 1)
        grads = {"w": jnp.sin(angles), "norm": jnp.cos(angles[0])}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(int(now[1].outer_count), steps):
        now = step(*now, k)
        hs.save_state(path, *now, tx)
        print(k + 1, flush=True)
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(now))).hexdigest()


def finished(path: pathlib.Path, steps: int) -> str:
    """Return the digest with which a run in a process of its own ends."""
    done = subprocess.run(child(path, steps), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"a run that goes on from {path} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.split()[-1]


def kill_once(path: pathlib.Path, steps: int, rng: random.Random, share: float) -> int:
    """Start a run and kill it; return the step that it had announced last, 0 where it had not begun.

    Args:
        path: of the state file.
        steps: at which it would end.
        rng: which decides on the moment.
        share: of the steps, after which it is killed at the latest.
    """
    step = 0
    with subprocess.Popen(child(path, steps), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for _ in range(rng.randrange(max(2, int(steps * share)))):
            step = int(run.stdout.readline().split()[0])
        time.sleep(rng.random() / 50)  # anywhere in a step, or in writing what it made
        run.send_signal(signal.SIGKILL)
    return step


def child(path: pathlib.Path, steps: int) -> list[str]:
    """Return the command that goes on with the run."""
    return [sys.executable, __file__, "--file", str(path), "--steps", str(steps)]


def main() -> int:
    """Run, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--file", type=pathlib.Path, help="go on from this file and stop: what is killed")
    options = parser.parse_args()
    if options.file:
        print(train(options.file, options.steps))
        return 0
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        expected = finished(pathlib.Path(folder) / "whole.safetensors", options.steps)
        broken = pathlib.Path(folder) / "broken.safetensors"
        at = [kill_once(broken, options.steps, rng, 0.8 / options.kills) for _ in range(options.kills)]
        same = finished(broken, options.steps) == expected
    print(f"killed at steps {', '.join(map(str, at))} of {options.steps}")
    print(
        f"{'holds' if same else 'FAILS'}: after {options.kills} kills the bits are those of an unbroken run"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
