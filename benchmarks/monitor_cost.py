"""What `Monitor` costs a training run, in both frameworks.

    python benchmarks/monitor_cost.py [--steps 12] [--layers 8] [--json NAME.json]

A model of square layers, 1,024 wide, takes steps on a batch of 64 rows. Torch has one thread. Each step is
followed by a `read` that measures it. Processor time is the least of the steps, so a machine at work counts
little. The last column is what one read of a hundred adds.
"""

import argparse
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import torch

import halfstep_jax
import halfstep_torch
from report import finish, print_table

WIDTH, BATCH = 1024, 64


def torch_step(layers: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of training and a read that measures each step, by PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model.to(torch.bfloat16)
    optimizer = halfstep_torch.AdamW(model.named_parameters(), lr=1e-3, compile=True)
    monitor = halfstep_torch.Monitor(optimizer, every=1)
    batch = torch.randn(BATCH, WIDTH).to(torch.bfloat16)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step(zero_grad=True)

    return step, monitor.read


def jax_step(layers: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of training and a read that measures each step, by JAX."""
    keys = jax.random.split(jax.random.key(0), layers + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH), jnp.bfloat16) / WIDTH**0.5 for key in keys[1:]]
    batch = jax.random.normal(keys[0], (BATCH, WIDTH), jnp.bfloat16)
    tx = halfstep_jax.adamw(1e-3)
    monitor = halfstep_jax.Monitor(tx, every=1)
    held = [params, tx.init(params)]

    def loss(params):
        x = batch
        for layer in params:
            x = x @ layer
        return jnp.square(x.astype(jnp.float32)).mean()

    @jax.jit
    def train_step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def step() -> None:
        held[:] = jax.block_until_ready(train_step(*held))

    return step, lambda: monitor.read(*held)


def measured(name: str, step: Callable[[], object], read: Callable[[], object], steps: int) -> dict:
    """Return what a step takes, and what one adds that is measured, in milliseconds."""
    taken: dict[str, list[float]] = {"step": [], "read": []}
    for _ in range(steps + 2):  # the first compile
        for part, run in (("step", step), ("read", read)):
            start = time.process_time()
            run()
            taken[part].append((time.process_time() - start) * 1e3)
    step_ms, read_ms = (min(times[2:]) for times in taken.values())
    return {"name": name, "step_ms": round(step_ms, 2), "read_ms": round(read_ms, 2)}


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="What Monitor costs a training run.")
    parser.add_argument("--steps", type=int, default=12, help="that are timed; by default 12")
    parser.add_argument("--layers", type=int, default=8, help="of the model; by default 8")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measured(name, *make(arguments.layers), arguments.steps)
        for name, make in (("PyTorch", torch_step), ("JAX", jax_step))
    ]
    cells = [
        (row["name"], row["step_ms"], f"{row['read_ms'] / row['step_ms']:.1%}", f"{_share(row):.2%}")
        for row in rows
    ]
    print_table("<framework | a step, ms | a measured step adds | at every=100", cells)
    held = {"Monitor takes under 1 % of a run at every=100": all(_share(row) < 0.01 for row in rows)}
    return finish(held, {"rows": rows}, arguments.json)


def _share(row: dict) -> float:
    return row["read_ms"] / row["step_ms"] / 100


if __name__ == "__main__":
    raise SystemExit(main())
