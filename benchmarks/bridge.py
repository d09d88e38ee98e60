"""Time a step through `OptaxOptimizer` beside the same transform in JAX, and beside a native torch optimizer.

    python benchmarks/bridge.py [--rounds 25] [--json benchmarks/results/NAME.json]

Prints milliseconds per step, of bfloat16 weights: the median, the least, and the processor time of all
threads (steadier on a shared machine). The bridge's own cost is a row less that of the same transform in JAX:
JAX may write new weights and state over the old ones, and the bridge may not.
"""

import argparse
import json
import math
import pathlib

import jax.numpy as jnp
import optax
import torch
from timing import Contender, in_quiet_process, jax_contender, machine, measure, torch_contender

import halfstep_jax
import halfstep_torch
from halfstep_torch.bridge import OptaxOptimizer

# Muon multiplies matrices: of two million elements for seconds.
LAYOUTS = {
    "1 x 2M": (1, (2048, 1024), ("optax.adamw", "halfstep_jax.adamw")),
    "30 x 4k": (30, (64, 64), ("optax.adamw", "halfstep_jax.adamw", "muon", "store_state(muon, fp8)")),
}
_LR = 1e-3
NATIVE = {
    "torch.optim.AdamW(fused)": lambda params: torch.optim.AdamW(params, _LR, fused=True),
    "halfstep_torch.AdamW": lambda params: halfstep_torch.AdamW(named(params), _LR, compile=True),
}


def transforms() -> dict:
    """Return the Optax transforms that are timed, in JAX and through the bridge."""
    muon = optax.contrib.muon(_LR)
    return {
        "optax.adamw": optax.adamw(_LR),
        "halfstep_jax.adamw": halfstep_jax.adamw(_LR),
        "muon": muon,
        "store_state(muon, fp8)": halfstep_jax.store_state(muon, halfstep_jax.scaled("float8_e4m3fn")),
    }


def through_bridge(tx):
    """Return what makes a torch optimizer of a transform."""
    return lambda params: OptaxOptimizer(named(params), tx)


def named(params) -> list:
    """Return parameters with names."""
    return [(f"w{i}", p) for i, p in enumerate(params)]


def contenders(layout: str) -> list[Contender]:
    """Return everything that is timed for a layout."""
    leaves, shape, names = LAYOUTS[layout]
    entries = [
        torch_contender(name, make, torch.bfloat16, [shape] * leaves, 0) for name, make in NATIVE.items()
    ]
    for name in names:
        tx = transforms()[name]
        make = through_bridge(tx)
        entries += [
            jax_contender(f"{name}, in JAX", tx, jnp.bfloat16, leaves, shape, 0),
            torch_contender(f"{name}, OptaxOptimizer", make, torch.bfloat16, [shape] * leaves, 0),
        ]
    return entries


def table(layout: str, entries: list[Contender]) -> list[dict]:
    """Print the rows of a layout and return them; `measure` gave milliseconds."""
    print(f"\n{layout:44}{'ms/step':>10}{'min':>8}{'cpu':>8}")
    rows = []
    for entry in entries:
        row = entry.figures
        print(f"{entry.name:44}{row['ns']:10.2f}{row['min']:8.2f}{row['cpu']:8.2f}")
        ms = {"ms": row["ns"], "min": row["min"], "cpu": row["cpu"]}
        rows.append({"layout": layout, "name": entry.name, **ms})
    return rows


def main() -> int:
    """Run the benchmark, in a process whose thread settings stood before it began."""
    threads = in_quiet_process()
    parser = argparse.ArgumentParser(description="Time steps through OptaxOptimizer.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    print(machine(threads))
    rows = []
    for layout in LAYOUTS:
        entries = contenders(layout)
        # In units of a million nanoseconds, of all threads together.
        measure(entries, arguments.rounds, 1_000_000, 1)
        rows += table(layout, entries)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(threads), "rows": rows}, indent=1) + "\n")
    return int(not all(math.isfinite(row["ms"]) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
