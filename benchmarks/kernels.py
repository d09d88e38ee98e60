"""Time steps by generated kernels on a CPU over torch's AdamW and over a copy of their bytes.

    python benchmarks/kernels.py [--threads 1] [--rounds 7] [--recipes sixteen_bit eight_bit]

Weights are bfloat16. The contenders of a case are interleaved; a row has ratios of medians of processor time.
"kernel over copy" is the time in the kernels alone. The last rows are of the default: its first step without
a stored library, a warm step, and the host's part of a warm step, which is all but the kernels. Instructions
on a GPU are counted by `compiled_torch.py`.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from host_time import count_calls

import halfstep_torch as hs
from halfstep_torch.engine.kernels.c_kernel import CKernel

_DRAWN = random.Random(0)
CASES = {
    "4M in one array": [(2048, 2048)],
    "300 of 1k-50k": [(_DRAWN.randint(1000, 50_000),) for _ in range(300)],
    "300 of 64-4k": [(_DRAWN.randint(64, 4096),) for _ in range(300)],
    "1,000 of 16-500": [(_DRAWN.randint(16, 500),) for _ in range(1000)],
    "100 of 40k": [(200, 200)] * 100,
}
AIMS = {"sixteen_bit": (0.46, 0.40, 0.35, 0.30, 0.40), "one_pass": (0.55,), "eight_bit": (1.2,)}
"""What a step may take of torch's foreach, by recipe and case."""

_FIRST = """
import os, torch, halfstep_torch as hs
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.randn(2048, 2048).bfloat16())
p.grad = torch.ones_like(p)
optimizer = hs.AdamW([("w", p)], lr=1e-3, compile=True)
before = sum(os.times()[:4])
optimizer.step()
print(sum(os.times()[:4]) - before)
"""


def weights(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    """Return weights with gradients."""
    made = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape).bfloat16() * 1e-2
    return made


def ours(shapes: list[tuple[int, ...]], recipe: str = "sixteen_bit") -> hs.AdamW:
    """Return our optimizer of new weights."""
    named = [(f"w{i}", p) for i, p in enumerate(weights(shapes))]
    return hs.AdamW(named, lr=1e-3, compile=True, **getattr(hs.recipes, recipe))


def contenders(shapes: list[tuple[int, ...]], recipe: str) -> dict[str, Callable[[], object]]:
    """Return the steps of a case, and a copy of the 14 bytes that a default step moves for each weight."""
    foreach = torch.optim.AdamW(weights(shapes), lr=1e-3, foreach=True)
    fused = torch.optim.AdamW(weights(shapes), lr=1e-3, fused=True)
    source = torch.zeros(7 * sum(p.numel() for p in weights(shapes)), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {
        "halfstep": ours(shapes, recipe).step,
        "foreach": foreach.step,
        "fused": fused.step,
        "copy": lambda: target.copy_(source),
    }


@contextmanager
def in_kernels(times: list[float], *, run: bool = True) -> Iterator[None]:
    """Add up the processor time in kernels in the last item of `times`; or do not `run` them."""
    call = CKernel.__call__

    def timed(self: CKernel, *arguments: Any, **options: Any) -> None:
        start = time.process_time()
        if run:
            call(self, *arguments, **options)
        times[-1] += time.process_time() - start

    with unittest.mock.patch.object(CKernel, "__call__", timed):
        yield


def medians(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return median seconds, interleaved, and those of the kernels."""
    times: dict[str, list[float]] = {name: [] for name in (*steps, "kernel")}
    with in_kernels(times["kernel"]):
        for _ in range(rounds + 2):
            times["kernel"].append(0.0)
            for name, step in steps.items():
                start = time.process_time()
                step()
                times[name].append(time.process_time() - start)
    return {name: statistics.median(of_step[2:]) for name, of_step in times.items()}


def print_case(recipe: str, case: str, rounds: int, aim: float | None) -> None:
    """Print the row of a case."""
    found = medians(contenders(CASES[case], recipe), rounds)
    ratios = {f"over {name}": found["halfstep"] / found[name] for name in ("foreach", "fused", "copy")}
    ratios["kernel over copy"] = found["kernel"] / found["copy"]
    text = "   ".join(f"{name} {ratio:5.2f}" for name, ratio in ratios.items())
    print(f"{recipe:12s} {case:16s} {text}" + (f"   aim over foreach {aim}" if aim else ""), flush=True)


def print_host(rounds: int) -> None:
    """Print what the host does: in a first step, and in a warm one."""
    environment = os.environ | {"HALFSTEP_KERNELS": ""}
    first = subprocess.run([sys.executable, "-c", _FIRST], env=environment, capture_output=True, check=True)
    print(f"first step, no stored library: {float(first.stdout):.2f} processor seconds   aim 0.6")
    hundred = ours([(64, 64)] * 100)
    for _ in range(3):
        hundred.step()
    calls = count_calls(hundred.step)
    print(f"warm step, 100 weights: {calls['calls']} Python calls, {calls['files']} files   aim 40, 10")
    for count in (1, 148, 1000):
        optimizer, fused = ours([(16,)] * count), torch.optim.AdamW(weights([(16,)] * count), fused=True)
        least = {"host": float("inf"), "fused": float("inf")}
        optimizer.step()  # which compiles
        with in_kernels([0.0], run=False):
            for _ in range(20 * rounds):
                for name, step in (("host", optimizer.step), ("fused", fused.step)):
                    start = time.process_time()
                    step()
                    least[name] = min(least[name], time.process_time() - start)
        print(
            f"host's part, {count} weights: over torch fused {least['host'] / least['fused']:.2f}   aim 0.5"
        )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipes", nargs="*", default=["sixteen_bit", "one_pass", "eight_bit", "four_bit"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for recipe in arguments.recipes:
        aims = dict(zip(CASES, AIMS.get(recipe, ()), strict=False))
        for case in CASES if recipe == "sixteen_bit" else [*CASES][:1]:
            print_case(recipe, case, arguments.rounds, aims.get(case))
    print_host(arguments.rounds)


if __name__ == "__main__":
    main()
