"""Time steps by generated kernels on a CPU over torch's AdamW and over a copy of their bytes.

    python benchmarks/kernels.py [--threads 1] [--rounds 7] [--recipes sixteen_bit one_pass eight_bit]

Weights are bfloat16. The contenders of a case are interleaved; a row has ratios of medians of processor time.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

import halfstep_torch as hs

_DRAWN = random.Random(0)
CASES = {
    "4M in one array": [(2048, 2048)],
    "300 of 1k-50k": [(_DRAWN.randint(1000, 50_000),) for _ in range(300)],
    "300 of 64-4k": [(_DRAWN.randint(64, 4096),) for _ in range(300)],
    "1,000 of 16-500": [(_DRAWN.randint(16, 500),) for _ in range(1000)],
    "100 of 40k": [(200, 200)] * 100,
}


def weights(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    """Return weights with gradients."""
    made = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape).bfloat16() * 1e-2
    return made


def contenders(shapes: list[tuple[int, ...]], recipe: str) -> dict[str, Callable]:
    """Return the steps of a case, and a copy of the 14 bytes that a default step moves for each weight."""
    named = [(f"w{i}", p) for i, p in enumerate(weights(shapes))]
    ours = hs.AdamW(named, lr=1e-3, compile=True, **getattr(hs.recipes, recipe))
    foreach = torch.optim.AdamW(weights(shapes), lr=1e-3, foreach=True)
    fused = torch.optim.AdamW(weights(shapes), lr=1e-3, fused=True)
    source = torch.zeros(7 * sum(p.numel() for _, p in named), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {
        "halfstep": ours.step,
        "foreach": foreach.step,
        "fused": fused.step,
        "copy": lambda: target.copy_(source),
    }


def medians(steps: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Return median seconds, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(of_step[2:]) for name, of_step in times.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipes", nargs="+", default=["sixteen_bit", "one_pass", "eight_bit"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for recipe in arguments.recipes:
        for case, shapes in CASES.items() if recipe == "sixteen_bit" else [*CASES.items()][:1]:
            found = medians(contenders(shapes, recipe), arguments.rounds)
            ratios = [
                f"over {name} {found['halfstep'] / found[name]:5.2f}" for name in ("foreach", "fused", "copy")
            ]
            print(f"{recipe:12s} {case:16s} {'   '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
