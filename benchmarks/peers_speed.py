"""Time a step of every optimizer of `peers.py`, ours and other libraries', interleaved in one process.

    make peers-speed
    python benchmarks/peers_speed.py [--rounds 9] [--json benchmarks/results/NAME.json]

Weights and gradients are bfloat16, in one array of 16 million parameters, and in 300 arrays of 8 to 64
thousand. Prints median nanoseconds per parameter, processor time, and ratios to a copy of 14 bytes per
parameter and to torch's fused AdamW, which both move 14. Run it on a machine that does nothing else.
`comparison.py --write` makes a table of the newest record.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import logging
import pathlib
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import peers
import torch
from timing import Contender, copy_contender, in_quiet_process, machine, measure

from report import print_table

LAYOUTS = {
    "1 x 16M": [(4096, 4096)],
    "300 x 8k to 64k": [(64, 128), (128, 256), (256, 256)] * 100,
}
_NUMBERS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}
LIMIT = 120  # HeavyBall compiles 300 arrays into a single program, which takes many minutes.
COPY, FUSED = "copy of 14 bytes", "torch AdamW(fused)"


def torch_contender(entry: peers.Entry, shapes: Sequence[tuple[int, ...]]) -> Contender:
    """Return a step in torch; gradients are set anew before each: some libraries drop or overwrite them."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    params, grads = [torch.nn.Parameter(w) for w in weights], [w * 1e-2 for w in weights]
    kept = [torch.empty_like(g) for g in grads]
    optimizer = entry.make(params, **_NUMBERS, **entry.arguments[0])

    def prepare():
        torch._foreach_copy_(kept, grads)
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad

    return Contender(entry.name, 14, optimizer.step, prepare=prepare)


def jax_contender(entry: peers.Entry, shapes: Sequence[tuple[int, ...]]) -> Contender:
    """Return a step in JAX, jitted, with weights and state donated."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        f"w{i}": jax.random.normal(k, s, jnp.bfloat16)
        for i, (k, s) in enumerate(zip(keys, shapes, strict=True))
    }
    grads = {name: p * jnp.bfloat16(1e-2) for name, p in params.items()}
    init, update = entry.make(**_NUMBERS)
    update = jax.jit(update, donate_argnums=(0, 1))
    held = [
        params,
        jax.tree.map(jnp.copy, init(params)),
    ]  # a library may put a key of its own into each state

    def step():
        held[:] = update(*held, grads)
        jax.block_until_ready(held)

    return Contender(entry.name, 14, step)


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError once what is inside has taken so many seconds of processor time."""
    stopped = TimeoutError(f"no step within {seconds} s of processor time")

    def stop(*_):
        raise stopped

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except Exception as error:
        # A compiler raises another error from this one.
        raise stopped if stopped.__traceback__ else error from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def contenders(shapes: Sequence[tuple[int, ...]]) -> tuple[list[Contender], dict[str, str]]:
    """Return a copy and every optimizer that takes a step, and why the others take none."""
    size = sum(map(np.prod, shapes))
    entries, failed = [copy_contender(14, 1, (1, int(size)))], {}
    for entry in (entry for entry in peers.entries() if entry.timed):
        make = torch_contender if entry.framework == "torch" else jax_contender
        try:
            with limited(LIMIT):
                contender = make(entry, shapes)
                contender.prepare()
                contender.step()
            entries.append(contender)
        except Exception as error:
            first_line = str(error).strip().split("\n")[0][:160]
            failed[entry.name] = f"{type(error).__name__}: {first_line}"
            print(f"{entry.name} does not run: {failed[entry.name]}", file=sys.stderr)
    return entries, failed


def table(layout: str, entries: list[Contender], failed: dict[str, str]) -> list[dict]:
    """Print the rows of a layout, and return them, with those of what does not run."""
    figures = {entry.name: entry.figures for entry in entries}
    rows = [
        {
            "layout": layout,
            "name": name,
            **row,
            "x copy": row["ns"] / figures[COPY]["ns"],
            "x fused": row["ns"] / figures[FUSED]["ns"],
        }
        for name, row in figures.items()
    ]
    keys = ("ns", "min", "cpu", "x copy", "x fused")
    print_table(
        f"<{layout} | ns | least | processor | x copy | x fused",
        ((row["name"], *(f"{row[key]:.2f}" for key in keys)) for row in rows),
    )
    return rows + [{"layout": layout, "name": name, "does not run": why} for name, why in failed.items()]


def main() -> None:
    """Run the benchmark, in a process whose thread settings stood before it began."""
    parser = argparse.ArgumentParser(
        description="Time steps beside other libraries', interleaved in one run."
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    threads = in_quiet_process()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = []
    for layout, shapes in LAYOUTS.items():
        entries, failed = contenders(shapes)
        measure(entries, arguments.rounds, int(sum(map(np.prod, shapes))), threads)
        rows += table(layout, entries, failed)
    if arguments.json:
        packages = sorted({entry.distribution for entry in peers.entries()} - {"halfstep"})
        about = machine(threads)
        about["versions"] |= {name: importlib.metadata.version(name) for name in packages}
        record = {"date": datetime.date.today().isoformat(), "machine": about, "rounds": arguments.rounds}
        record["rows"] = rows
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
