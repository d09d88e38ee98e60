"""Time our steps beside torchao's, which round weights stochastically too.

    pip install --no-deps torchao
    python benchmarks/torchao_steps.py [--rounds 9] [--json benchmarks/results/NAME.json]

Weights and gradients are bfloat16. torchao draws words from torch's generator for the weights alone, and
rounds moments of 16 bits to nearest; ours draw words of a counter for both. Everything runs interleaved in
one process.
"""

import argparse
import importlib.metadata
import json
import pathlib

import numpy as np
import torch
from step import LAYOUTS
from timing import Contender, copy_contender, in_quiet_process, machine, measure, torch_contender

import halfstep_torch as hs

_NUMBERS = {"lr": 1e-4, "weight_decay": 0.1}
# Ours, and the step of torchao that keeps as many bytes and rounds the weights as well.
PAIRS = {
    "halfstep_torch.AdamW, bfloat16 (default)": "torchao AdamW, bfloat16",
    "halfstep_torch.AdamW, eight_bit": "torchao AdamW8bit",
    "halfstep_torch.AdamW, one_pass": "torchao AdamWFp8",
}


def contenders(layout: str) -> list[Contender]:
    """Return everything that is timed for a layout."""
    from torchao import optim

    leaves, shape = LAYOUTS[layout]

    def ours(**options):
        return lambda params: hs.AdamW(params, **_NUMBERS, compile=True, **options)

    def theirs(make):
        return lambda params: make(params, **_NUMBERS, bf16_stochastic_round=True)

    makes = {
        "torch AdamW(fused), to nearest": (lambda p: torch.optim.AdamW(p, **_NUMBERS, fused=True), 14),
        "torchao AdamW, bfloat16": (theirs(optim._AdamW), 14),
        "torchao AdamW8bit": (theirs(optim.AdamW8bit), 10),
        "torchao AdamWFp8": (theirs(optim.AdamWFp8), 10),
        "halfstep_torch.AdamW, bfloat16 (default)": (ours(), 14),
        "halfstep_torch.AdamW, eight_bit": (ours(**hs.recipes.eight_bit), 10),
        "halfstep_torch.AdamW, one_pass": (ours(**hs.recipes.one_pass), 10),
    }
    entries = [
        torch_contender(name, make, torch.bfloat16, [shape] * leaves, moved)
        for name, (make, moved) in makes.items()
    ]
    return [copy_contender(14, leaves, shape), *entries]


def table(layout: str, entries: list[Contender]) -> list[dict]:
    """Print the rows of a layout, and theirs against ours; return the rows."""
    print(f"\n{layout:44}{'ns/param':>10}{'min':>8}{'cpu/threads':>13}")
    rows = [{"layout": layout, "name": entry.name, **entry.figures} for entry in entries]
    for row in rows:
        print(f"{row['name']:44}{row['ns']:10.3f}{row['min']:8.3f}{row['cpu']:13.3f}")
    ns = {row["name"]: row["ns"] for row in rows}
    for ours, theirs in PAIRS.items():
        print(f"{theirs} / {ours} = {ns[theirs] / ns[ours]:.2f}")
    return rows


def main() -> None:
    """Run the benchmark, in a process whose thread settings stood before it began."""
    parser = argparse.ArgumentParser(description="Time our steps beside torchao's, interleaved in one run.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        parser.exit(2, "torchao is not installed. Run: pip install --no-deps torchao\n")
    threads = in_quiet_process()
    of_machine = machine(threads)
    of_machine["versions"]["torchao"] = version
    print(of_machine)
    rows = []
    for layout, (leaves, shape) in LAYOUTS.items():
        entries = contenders(layout)
        measure(entries, arguments.rounds, leaves * int(np.prod(shape)), threads)
        rows += table(layout, entries)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": of_machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
