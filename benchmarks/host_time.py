"""What a step costs the host: Python calls and processor time, beside torch's own AdamW.

    python benchmarks/host_time.py [--only TEXT ...] [--rounds 40] [--json NAME.json]

The rows of a case run interleaved in one process, on one thread, with gradients that stay. Calls are those
of Python functions in a warm step: of all modules, and of this house's alone with the classes and files that
they are of. Processor time is the least of the rounds, so a machine at work counts little. The last case is a
model under FSDP2 in two processes, by the first.
"""

import argparse
import collections
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

import halfstep
import halfstep_torch
from report import finish, print_table

Shape = tuple[int, ...]
_HOUSE = tuple(str(pathlib.Path(module.__file__).parent) for module in (halfstep, halfstep_torch))


def _lengths(low: int, high: int, count: int = 300) -> list[Shape]:
    generator = torch.Generator().manual_seed(0)
    return [(int(n),) for n in torch.randint(low, high + 1, (count,), generator=generator)]


CASES: dict[str, list[Shape]] = {
    "1 of 64 x 64": [(64, 64)],
    "100 of 64 x 64": [(64, 64)] * 100,
    "400 of 64 x 64": [(64, 64)] * 400,
    "2,000 of 64 x 64": [(64, 64)] * 2000,
    "LoRA, 400 of 16 x 1,024": [(16, 1024), (1024, 16)] * 200,
    "300 of 1k to 50k": _lengths(1_000, 50_000),
    "300 of 64 to 4k": _lengths(64, 4_000),
    "1,000 of 16 to 500": _lengths(16, 500, 1000),
}
SHARDED = "FSDP2, 100 of 64 x 64"
ROWS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "eager": lambda pairs: halfstep_torch.AdamW(pairs, lr=1e-3, compile=False),
    "compiled": lambda pairs: halfstep_torch.AdamW(pairs, lr=1e-3, compile=True),
    "one_pass": lambda pairs: halfstep_torch.AdamW(pairs, lr=1e-3, compile=True, recipe="one_pass"),
    "torch foreach": lambda pairs: torch.optim.AdamW(pairs, lr=1e-3, foreach=True),
    "torch fused": lambda pairs: torch.optim.AdamW(pairs, lr=1e-3, fused=True),
}


def named_parameters(shapes: Sequence[Shape]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return bfloat16 parameters with gradients."""
    generator, pairs = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(shapes):
        param = torch.nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16))
        param.grad = torch.randn(shape, generator=generator).to(torch.bfloat16) * 1e-2
        pairs.append((f"w{i}", param))
    return pairs


def count_calls(step: Callable[[], object]) -> dict[str, int]:
    """Return how many Python functions a step calls: of all modules, and of the house."""
    every, ours, classes, files = 0, 0, set(), set()

    def profile(frame, event, _):
        nonlocal every, ours
        if event != "call":
            return
        every += 1
        code = frame.f_code
        if code.co_filename.startswith(_HOUSE):
            ours += 1
            files.add(code.co_filename)
            owner = code.co_qualname.partition(".")[0]
            if owner.lstrip("_")[:1].isupper():
                classes.add(owner)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return {"calls": every, "of the house": ours, "classes": len(classes), "files": len(files)}


def measured(steps: dict[str, Callable[[], object]], rounds: int) -> list[dict]:
    """Return of each step its calls and its least processor time, in microseconds, interleaved."""
    least: dict[str, float] = collections.defaultdict(lambda: float("inf"))
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            least[name] = min(least[name], (time.process_time() - start) * 1e6)
    return [{"row": name, **count_calls(step), "us": round(least[name], 1)} for name, step in steps.items()]


def measure_case(case: str, rounds: int) -> list[dict]:
    """Return the rows of a case."""
    steps = {name: make(named_parameters(CASES[case])).step for name, make in ROWS.items()}
    rounds = max(rounds * 100 // max(len(CASES[case]), 100), 8)
    return [{"case": case, **row} for row in measured(steps, rounds)]


def measure_sharded(rank: int, store: str, rounds: int, record: str) -> None:
    """Write, in a process of two, the rows of a model whose weights are DTensors."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(100)))
    model = fully_shard(model.to(torch.bfloat16), mesh=mesh)
    steps = {}
    for name, make in ROWS.items():
        if name != "torch fused":
            optimizer = make(list(model.named_parameters()))
            for param in model.parameters():
                param.grad = torch.full_like(param, 1e-2)
            steps[name] = optimizer.step
    rows = measured(steps, rounds)
    if not rank:
        torch.save([{"case": SHARDED, **row} for row in rows], record)
    torch.distributed.destroy_process_group()


def _sharded(rounds: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        record = f"{folder}/rows"
        arguments = (f"{folder}/store", rounds, record)
        torch.multiprocessing.spawn(measure_sharded, arguments, nprocs=2)
        return torch.load(record)


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="What a step costs the host.")
    parser.add_argument("--only", nargs="*", default=[""], help="cases in whose names one of these stands")
    parser.add_argument("--rounds", type=int, default=40, help="of 100 weights or fewer; by default 40")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in [*CASES, SHARDED]:
        if not any(text in case for text in arguments.only):
            continue
        of_case = _sharded(arguments.rounds) if case == SHARDED else measure_case(case, arguments.rounds)
        foreach = next(row["us"] for row in of_case if row["row"] == "torch foreach")
        rows += [{**row, "of foreach": round(row["us"] / foreach, 2)} for row in of_case]
        print(f"measured {case}", file=sys.stderr, flush=True)
    head = "<case | <row | calls | of the house | classes | files | us | of foreach"
    print_table(head, ([row[name.strip(" <")] for name in head.split("|")] for row in rows))
    return finish({}, {"torch": torch.__version__, "threads": 1, "rows": rows}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
