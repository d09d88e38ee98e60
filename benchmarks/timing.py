"""What is timed, and how: interleaved in one process, so that whatever else happens, happens to all."""

import dataclasses
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

# Threads sleep while they wait: torch's would spin while a step of JAX runs. No thread is pinned to a core,
# because JAX's threads may run only where the thread that makes them may.
QUIET = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
QUIET["JAX_PLATFORMS"] = "cpu"


@dataclasses.dataclass
class Contender:
    """Something to be timed.

    Attributes:
        name: for the table.
        bytes: that a step must move per parameter: weights and state read and written, gradients read.
        step: runs once, and returns when done.
        prepare: what comes before each step, and is not timed.
    """

    name: str
    bytes: int
    step: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        """Nanoseconds per parameter: median and least wall time, median processor time per thread."""
        wall, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        return {"ns": wall, "min": min(self.wall), "cpu": cpu}


def copy_contender(bytes_per_param: int, leaves: int, shape: Sequence[int]) -> Contender:
    """Copy half of `bytes_per_param` and so move all of them."""
    size = leaves * int(np.prod(shape)) * bytes_per_param // 2
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return Contender(f"copy of {bytes_per_param} bytes", bytes_per_param, lambda: target.copy_(source))


def jax_contender(name: str, tx, dtype, leaves: int, shape, bytes_per_param: int) -> Contender:
    """An Optax transform with optax.apply_updates, jitted and donated."""
    keys = jax.random.split(jax.random.key(0), leaves)
    params = {f"w{i}": jax.random.normal(k, shape, jnp.float32).astype(dtype) for i, k in enumerate(keys)}
    gradients = {name: (p * jnp.asarray(1e-2, dtype)) for name, p in params.items()}
    state = tx.init(params)

    def update(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, donate_argnums=(0, 1))
    held = [params, state]

    def step():
        held[:] = update(*held, gradients)
        jax.block_until_ready(held)

    return Contender(name, bytes_per_param, step)


def torch_contender(name: str, make, dtype, shapes: Sequence, bytes_per_param: int) -> Contender:
    """A torch.optim optimizer."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = (p.detach() * 1e-2).to(dtype)
    return Contender(name, bytes_per_param, make(params).step)


def measure(entries: list[Contender], rounds: int, params: int, threads: int) -> None:
    """Time every contender once per round: whatever else happens on the machine happens to all of them."""
    for entry in entries:
        for _ in range(3):
            entry.prepare()
            entry.step()
    for _ in range(rounds):
        for entry in entries:
            entry.prepare()
            wall, cpu = time.perf_counter(), time.process_time()
            entry.step()
            entry.cpu.append((time.process_time() - cpu) / params / threads * 1e9)
            entry.wall.append((time.perf_counter() - wall) / params * 1e9)


def in_quiet_process() -> int:
    """Start again with the thread settings of `QUIET`, if they do not hold; return the number of threads."""
    if not QUIET.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **QUIET})
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    return threads


def machine(threads: int) -> dict:
    """Return what the figures depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": threads,
        "compiler": "clang++" if shutil.which("clang++") else "g++",
        "versions": {module.__name__: module.__version__ for module in (jax, optax, torch, np)},
    }
