"""Time an optimizer step against peers, and against copying the bytes that it must move.

    python benchmarks/step.py [--rounds 15] [--json benchmarks/results/NAME.json]

Everything runs interleaved in one process. Prints the median nanoseconds per parameter and step, the
processor time behind it (of all threads, divided by their number: steadier on a shared machine), and the
ratio to a copy of as many bytes.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import halfstep_jax
import halfstep_torch

# Pinned threads that sleep while they wait: spinning ones read up to 30x too slow on a shared machine.
QUIET = {"OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
QUIET["JAX_PLATFORMS"] = "cpu"
LAYOUTS = {"1 x 16M": (1, (4096, 4096)), "100 x 160k": (100, (400, 400))}
_LR, _DECAY = 1e-4, 0.1


@dataclasses.dataclass
class Contender:
    """Something to be timed.

    Attributes:
        name: for the table.
        bytes: that a step must move per parameter: weights and state read and written, gradients read.
        step: runs once, and returns when done.
    """

    name: str
    bytes: int
    step: Callable[[], None]
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


def copy_contender(bytes_per_param: int, leaves: int, shape: tuple[int, int]) -> Contender:
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


def torch_contender(name: str, make, dtype, leaves: int, shape, bytes_per_param: int) -> Contender:
    """A torch.optim optimizer."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in range(leaves)]
    for p in params:
        p.grad = (p.detach() * 1e-2).to(dtype)
    return Contender(name, bytes_per_param, make(params).step)


def contenders(layout: str) -> list[Contender]:
    """Return everything that is timed for a layout."""
    leaves, shape = LAYOUTS[layout]
    f32, bf16 = (jnp.float32, torch.float32), (jnp.bfloat16, torch.bfloat16)

    def on_jax(name, tx, dtypes, moved):
        return jax_contender(name, tx, dtypes[0], leaves, shape, moved)

    def on_torch(name, make, dtypes, moved):
        return torch_contender(name, make, dtypes[1], leaves, shape, moved)

    def fused(params):
        return torch.optim.AdamW(params, lr=_LR, weight_decay=_DECAY, fused=True)

    def ours(**options):
        return lambda params: halfstep_torch.AdamW(params, lr=_LR, weight_decay=_DECAY, **options)

    peer, adamw = optax.adamw(_LR, weight_decay=_DECAY), halfstep_jax.adamw
    forced = {"param_storage": "nearest", "nu_rounding": "nearest_unchecked"}
    return [
        copy_contender(14, leaves, shape),
        copy_contender(28, leaves, shape),
        on_jax("optax.adamw, float32", peer, f32, 28),
        on_jax("optax.adamw, bfloat16", peer, bf16, 14),
        on_jax("halfstep_jax.adamw, float32", adamw(_LR, weight_decay=_DECAY), f32, 28),
        on_jax("halfstep_jax.adamw, bfloat16, nearest", adamw(_LR, weight_decay=_DECAY, **forced), bf16, 14),
        on_jax("halfstep_jax.adamw, bfloat16 (default)", adamw(_LR, weight_decay=_DECAY), bf16, 14),
        on_torch("torch AdamW(fused), float32", fused, f32, 28),
        on_torch("torch AdamW(fused), bfloat16", fused, bf16, 14),
        on_torch("halfstep_torch.AdamW, float32", ours(compile=True), f32, 28),
        on_torch("halfstep_torch.AdamW, bfloat16, nearest", ours(compile=True, **forced), bf16, 14),
        on_torch("halfstep_torch.AdamW, bfloat16 (default)", ours(compile=True), bf16, 14),
    ]


def measure(entries: list[Contender], rounds: int, params: int, threads: int) -> None:
    """Time every contender once per round: whatever else happens on the machine happens to all of them."""
    for entry in entries:
        for _ in range(3):
            entry.step()
    for _ in range(rounds):
        for entry in entries:
            wall, cpu = time.perf_counter(), time.process_time()
            entry.step()
            entry.cpu.append((time.process_time() - cpu) / params / threads * 1e9)
            entry.wall.append((time.perf_counter() - wall) / params * 1e9)


def table(layout: str, entries: list[Contender]) -> list[dict]:
    """Print the rows of a layout and return them."""
    copies = {
        entry.bytes: statistics.median(entry.wall) for entry in entries if entry.name.startswith("copy")
    }
    print(f"\n{layout:44}{'ns/param':>10}{'min':>8}{'cpu/threads':>13}{'bytes':>7}{'x copy':>8}")
    rows = []
    for entry in entries:
        wall, cpu = statistics.median(entry.wall), statistics.median(entry.cpu)
        ratio = wall / copies[entry.bytes]
        print(f"{entry.name:44}{wall:10.3f}{min(entry.wall):8.3f}{cpu:13.3f}{entry.bytes:7d}{ratio:8.2f}")
        rows.append(
            {"layout": layout, "name": entry.name, "ns": wall, "min": min(entry.wall), "cpu": cpu, "x": ratio}
        )
    return rows


def ratios(rows: list[dict]) -> None:
    """Print ours against each peer."""
    ns = {(row["layout"], row["name"]): row["ns"] for row in rows}
    pairs = {
        "halfstep_jax.adamw, bfloat16 (default)": ("optax.adamw, bfloat16", "optax.adamw, float32"),
        "halfstep_torch.AdamW, bfloat16 (default)": (
            "torch AdamW(fused), bfloat16",
            "torch AdamW(fused), float32",
        ),
    }
    print()
    for layout in dict.fromkeys(row["layout"] for row in rows):
        for ours, peers in pairs.items():
            for peer in peers:
                print(f"{layout}: {ours} / {peer} = {ns[layout, ours] / ns[layout, peer]:.2f}")


def main() -> None:
    """Run the benchmark, in a process whose thread settings stood before it began."""
    if not QUIET.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **QUIET})
    parser = argparse.ArgumentParser(
        description="Time optimizer steps against peers, interleaved in one run."
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": threads,
        "compiler": "clang++" if shutil.which("clang++") else "g++",
        "versions": {module.__name__: module.__version__ for module in (jax, optax, torch, np)},
    }
    print(machine)
    rows = []
    for layout, (leaves, shape) in LAYOUTS.items():
        entries = contenders(layout)
        measure(entries, arguments.rounds, leaves * int(np.prod(shape)), threads)
        rows += table(layout, entries)
    ratios(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
