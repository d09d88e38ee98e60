"""What a step costs besides its arithmetic: the host's calls and time, `Monitor`, and compilation.

    python benchmarks/cost.py host [--only TEXT ...] [--rounds 40] [--json NAME.json]
    python benchmarks/cost.py monitor [--only TEXT ...] [--rounds 12] [--json NAME.json]
    python benchmarks/cost.py compile [--only TEXT ...] [--rounds 3] [--json NAME.json]

All times are of the processor and the least of the rounds, so a machine at work counts little; torch has one
thread.

*host*: Python calls and processor time of a warm step beside torch's own AdamW, interleaved, with gradients
that stay. Calls are those of Python functions: of all modules, and of this house's alone with the classes and
files that they are of. The last case is a model under FSDP2 in two processes, by the first.

*monitor*: a model of square layers takes steps on a batch of 64 rows, and after each step a `read` measures
it. The last column is what one read of a hundred adds.

*compile*: seconds to trace, lower and compile a step of JAX, on trees of bfloat16 leaves of 30 shapes at
most, as models repeat theirs; and the equations of the whole traced step per leaf, in which what several
calls share counts once. Nothing is kept of a step before.
"""

import argparse
import collections
import itertools
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax
import torch

import halfstep
import halfstep_jax
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


def host(only: Sequence[str], rounds: int) -> tuple[list[dict], dict[str, bool]]:
    """Return the rows of all cases."""
    rows = []
    for case in [case for case in (*CASES, SHARDED) if any(text in case for text in only)]:
        of_case = _sharded(rounds) if case == SHARDED else measure_case(case, rounds)
        foreach = next(row["us"] for row in of_case if row["row"] == "torch foreach")
        rows += [{**row, "of foreach": round(row["us"] / foreach, 2)} for row in of_case]
        print(f"measured {case}", file=sys.stderr, flush=True)
    return rows, {}


LAYERS, WIDTH, BATCH = 8, 1024, 64


def torch_step() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of training and a read that measures each step, by PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model.to(torch.bfloat16)
    optimizer = halfstep_torch.AdamW(model.named_parameters(), lr=1e-3, compile=True)
    monitor = halfstep_torch.Monitor(optimizer, every=1)
    batch = torch.randn(BATCH, WIDTH).to(torch.bfloat16)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step(zero_grad=True)

    return step, monitor.read


def jax_step() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of training and a read that measures each step, by JAX."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
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


def monitor(only: Sequence[str], rounds: int) -> tuple[list[dict], dict[str, bool]]:
    """Return what a step takes and what one adds that is measured, in milliseconds, and their claim."""
    rows = []
    for name, make in {"PyTorch": torch_step, "JAX": jax_step}.items():
        if not any(text in name for text in only):
            continue
        step, read = make()
        taken: dict[str, list[float]] = {"step_ms": [], "read_ms": []}
        for _ in range(rounds + 2):  # the first compile
            for part, run in (("step_ms", step), ("read_ms", read)):
                start = time.process_time()
                run()
                taken[part].append((time.process_time() - start) * 1e3)
        rows.append({"name": name} | {part: round(min(times[2:]), 2) for part, times in taken.items()})
        rows[-1]["at every=100"] = rows[-1]["read_ms"] / rows[-1]["step_ms"] / 100
    return rows, {"Monitor takes under 1 % of a run": all(row["at every=100"] < 0.01 for row in rows)}


LEAVES, SHAPES = (10, 50, 100), 30
FP8 = {"mu_dtype": halfstep_jax.scaled("float8_e4m3fn"), "nu_dtype": halfstep_jax.scaled("ufloat8_e5m3")}
STEPS = {
    "optax.adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "adamw": lambda: halfstep_jax.adamw(1e-3, weight_decay=0.1),
    "adamw, split16": lambda: halfstep_jax.adamw(1e-3, weight_decay=0.1, param_storage="split16"),
    "adamw, fp8": lambda: halfstep_jax.adamw(1e-3, weight_decay=0.1, **FP8),
    "adamw, eight_bit": lambda: halfstep_jax.adamw(1e-3, weight_decay=0.1, recipe="eight_bit"),
    "adamw, four_bit": lambda: halfstep_jax.adamw(1e-3, weight_decay=0.1, recipe="four_bit"),
    "lamb": lambda: halfstep_jax.lamb(1e-3, weight_decay=0.1),
    "optax.yogi": lambda: optax.yogi(1e-3),
    "store_state(optax.yogi)": lambda: halfstep_jax.store_state(optax.yogi(1e-3), "bfloat16"),
}


def compiled(tx, leaves: int, kinds: int) -> dict[str, float]:
    """Return seconds and equations of one step of `tx` on leaves of so many shapes, nothing of it traced."""
    jax.clear_caches()
    shapes = [(64 + 8 * (i % kinds), 128) for i in range(leaves)]
    params = {f"layer_{i}/kernel": jax.ShapeDtypeStruct(s, jnp.bfloat16) for i, s in enumerate(shapes)}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    times = [time.process_time()]
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, params)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    trace, lower, compile_ = (after - before for before, after in itertools.pairwise(times))
    memory = compiled.memory_analysis()
    return {
        "trace": trace,
        "lower": lower,
        "compile": compile_,
        "total": times[-1] - times[0],
        "equations per leaf": _equations(traced.jaxpr.jaxpr, set()) / leaves,
        "temporaries": memory.temp_size_in_bytes if memory else 0,
    }


def _equations(jaxpr, seen: set[int]) -> int:
    """Count the equations of a program and of those that it calls, each of these once."""
    if id(jaxpr) in seen:
        return 0
    seen.add(id(jaxpr))
    called = (j for eqn in jaxpr.eqns for j in jax.extend.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(_equations(j, seen) for j in called)


def compile_steps(only: Sequence[str], rounds: int) -> tuple[list[dict], dict[str, bool]]:
    """Return the rows of all steps and numbers of leaves, each of the round that took the least in all."""
    compiled(optax.sgd(1e-3), 1, 1)  # what the first compilation of a process costs is nobody's
    keys = [(name, n) for n in LEAVES for name in STEPS if any(text in name for text in only)]
    turns = [{(name, n): compiled(STEPS[name](), n, SHAPES) for name, n in keys} for _ in range(rounds)]
    least = {key: min((turn[key] for turn in turns), key=lambda row: row["total"]) for key in keys}
    return [{"step": name, "leaves": n, **row} for (name, n), row in least.items()], {}


SUBJECTS: dict[str, tuple[Callable[..., tuple[list[dict], dict[str, bool]]], int]] = {
    "host": (host, 40),
    "monitor": (monitor, 12),
    "compile": (compile_steps, 3),
}
"""By name: what measures, and how many rounds it takes."""


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="What a step costs besides its arithmetic.")
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--only", nargs="*", default=[""], help="cases in whose names one of these stands")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure, rounds = SUBJECTS[arguments.subject]
    rows, held = measure(arguments.only, arguments.rounds or rounds)

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else f"{value}"

    print_table(f"<{' | '.join(rows[0])}", (map(cell, row.values()) for row in rows))
    versions = {module.__name__: module.__version__ for module in (jax, optax, torch)}
    about = {"machine": platform.processor() or platform.machine(), "versions": versions, "threads": 1}
    about |= {"shapes": SHAPES} if arguments.subject == "compile" else {}
    return finish(held, about | {"rows": rows}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
