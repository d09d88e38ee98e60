"""What a GPU does with our steps: their time beside that of its memory and of peers, and their bits.

    make gpu MINUTES=9                               # on a machine with a GPU; again, and it goes on
    python benchmarks/gpu.py --device cpu --small    # the same, small, on a CPU

Each row is written as it comes. A later run has the rows of an earlier one, and takes those that are missing
or failed. First the time: a copy, then each step, by events of the device, as a share of the bandwidth of
that copy. A peer that is not installed is printed as absent. Then what else a device is asked: state on the
host, gradients that are released, a CUDA graph of the model. Then the bits: a share of the golden vectors,
roots and quotients, and training on the device beside the CPU (`tests/gpu`). Exits with 1 if a bit differs.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Where the devices are is known to the tests.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
# Both frameworks share the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import torch
from gpu_steps import TorchSteps, jax_steps, peers, settings, torch_steps

import halfstep_jax
import halfstep_torch
from backends import make as make_backend
from backends.devices import jax_device, on_device, why_absent
from compare import assert_same
from halfstep_spec import SPEC_VERSION
from halfstep_spec.vectors import load

ROOT = pathlib.Path(__file__).parents[1]
DEFAULT = "AdamW, bfloat16 (default)"
Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
_PACKAGES = (
    *("torch", "triton", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "ml_dtypes"),
    *("optax", "torchao", "bitsandbytes", "flashoptim", "transformer-engine", "apex"),
)
_ASKED = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


def machine(device: str) -> Row:
    """Return what the figures belong to."""
    row: Row = {"machine": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}
    for name in _PACKAGES:
        try:
            row[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            row[name] = "absent"
    row["cuda"] = torch.version.cuda
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
        row[_ASKED] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return row


def drawn(count: int, shape: tuple[int, ...], scale: float) -> list[np.ndarray]:
    """Return arrays of normal numbers: a million, again and again."""
    base = np.random.default_rng(0).normal(0, scale, 1 << 20).astype(np.float32)
    return [np.resize(base, shape)] * count


def milliseconds(device: str, call: Callable[[], Any], wait: Callable[[], Any], rounds: int) -> list[float]:
    """Return how long each of some calls takes, by events of the device where torch makes them."""
    taken = []
    for _ in range(rounds):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            wait()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            wait()
            taken.append(1e3 * (time.perf_counter() - start))
    return taken


def copy_row(device: str, small: bool, rounds: int) -> Row:
    """Return the bandwidth of a copy: bytes read and bytes written, per second."""
    source = torch.ones(1 << (20 if small else 33), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    taken = milliseconds(device, lambda: target.copy_(source), lambda: None, rounds + 1)[1:]
    rates = sorted(2 * source.numel() / ms / 1e9 for ms in taken)
    return {"TB/s": rates[len(rates) // 2], "least": rates[0], "most": rates[-1]}


def time_row(
    make: Callable[[], Any], gradients: list[np.ndarray], device: str, rounds: int, copy: Row
) -> Row:
    """Return how long a step takes, with its spread, its first step and its peak."""
    count = sum(g.size for g in gradients)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    steps = make()
    steps.give(gradients)
    steps.step()
    steps.wait()
    first = time.perf_counter() - start
    steps.step()
    steps.wait()
    compiled, of_torch = steps.compilations, isinstance(steps, TorchSteps)
    # Steps of JAX are not on torch's stream: the clock is read once they are done.
    taken = milliseconds(
        device if of_torch else "clock", steps.step, (lambda: None) if of_torch else steps.wait, rounds
    )
    steps.wait()
    median, bytes_moved = statistics.median(taken), steps.moved
    row = {"ns": 1e6 * median / count, "least": 1e6 * min(taken) / count, "most": 1e6 * max(taken) / count}
    row |= {"bytes": bytes_moved / count, "share": bytes_moved / median / 1e9 / copy["TB/s"], "first": first}
    row |= {"recompiled": steps.compilations - compiled, "by": "events" if of_torch else "clock"}
    if torch.cuda.is_available() and of_torch:
        row["peak"] = torch.cuda.max_memory_allocated() / count
    return row


def time_rows(device: str, small: bool, copy: Callable[[], Row]) -> Rows:
    """Yield the steps that are timed: the default and its peers before others."""
    layouts = {
        "1 array": (1, (31250, 32000)),
        "300 arrays": (300, (1824, 1824)),
        "10,000 small": (10_000, (8,)),
    }
    layouts = {"2 arrays": (2, (64, 512))} if small else layouts
    names, rounds = list(settings(halfstep_jax))[: 1 if small else None], 3 if small else 20
    for layout, (leaves, shape) in layouts.items():
        weights, gradients = drawn(leaves, shape, 0.05), drawn(leaves, shape, 1e-2)
        makers: dict[str, Callable[[], Any]] = {}
        for name in names:
            makers[f"torch: {name}"] = lambda name=name, w=weights: torch_steps(name, w, device, True)
            if layout != "10,000 small":  # where XLA compiles for minutes
                makers[f"JAX: {name}"] = lambda name=name, w=weights: jax_steps(name, w, jax_device(device))
            if name == DEFAULT:
                makers |= peers(weights, device)
                makers["torch: default, state on the host"] = lambda w=weights: torch_steps(
                    DEFAULT, w, device, True, state_device="cpu"
                )
        for name, make in makers.items():
            yield (
                f"time, {layout}: {name}",
                lambda make=make, g=gradients: time_row(make, g, device, rounds, copy()),
            )


def _train(device: str, width: int, how: str) -> tuple[torch.Tensor, int]:
    """Return weights after some steps of a stack of layers, and the bytes at the peak."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    optimizer = halfstep_torch.AdamW(model.named_parameters(), lr=1e-3, compile=False)
    x = torch.ones(4, width, dtype=torch.bfloat16, device=device)
    released = halfstep_torch.release_gradients(optimizer) if how == "released" else None
    run: Any = torch.cuda.make_graphed_callables(model, (x,)) if how == "graph" else model
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(4):
        run(x * (step + 1)).square().mean().backward()
        optimizer.step(zero_grad=True)
    if released:
        released.remove()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu(), peak


def way_row(device: str, width: int, how: str) -> Row:
    """Return how many weights differ from those of plain steps, and the peaks of both, in bytes a weight."""
    plain, peak = _train(device, width, "plain")
    weights, other = _train(device, width, how)
    differ = int((plain.view(torch.int16) != weights.view(torch.int16)).sum())
    return {"differ": differ, "peak": other / plain.numel(), "peak of plain": peak / plain.numel()}


def vector_row(backend: str, cases: list[Any], device: str) -> Row:
    """Return how many golden vectors a device was asked, and which it gets wrong."""
    runner, wrong = make_backend(backend), []
    with on_device(device):
        for case in cases:
            try:
                actual = runner.run(case)
                for output, expected in case.outputs.items():
                    assert_same(actual[output], expected, f"clauses {', '.join(case.clauses)}, {output}")
            except Exception as error:  # what a device cannot do is to be seen beside what else it cannot
                wrong.append(f"{case.key}: {type(error).__name__}: {str(error)[:300]}")
    return {"cases": len(cases), "wrong": wrong}


def test_row(test: str, device: str, seconds: float) -> Row:
    """Return what pytest says of a test in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", device, test]
    try:
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=-1, stderr=-2, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    last = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    passed = done.returncode == 0 and "passed" in last
    return {"said": last, "wrong": [] if passed else [done.stdout[-3000:]]}


def bit_rows(device: str, small: bool, left: Callable[[], float]) -> Rows:
    """Yield what is asked of the bits: a small share of every file first, the long runs last."""
    vectors = load(SPEC_VERSION)
    for one_in in (100,) if small else (50, 5):
        shares = {
            name: [case for case in cases if int(case.digest, 16) % one_in == 0]
            for name, cases in vectors.items()
        }
        asked = [(name, share) for name, share in shares.items() if share]
        for name, share in asked[: 2 if small else None]:
            for backend in ("torch-eager", "jax-jit"):
                key = f"bits, vectors, 1 in {one_in}: {backend}, {name}"
                yield (
                    key,
                    lambda backend=backend, share=share: vector_row(backend, share, device),
                )
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT, text=True, capture_output=True, check=False,
    ).stdout  # fmt: skip
    tests = re.findall(r"^tests/gpu/\S+::.*$", listed, re.MULTILINE)
    tests = [test for test in tests if "golden" not in test and (not small or "(default)" in test)]
    for test in sorted(tests, key=lambda test: "training" in test):
        yield f"bits, {test}", lambda test=test: test_row(test, device, min(max(left(), 60), 3600))


def line(key: str, row: Row) -> str:
    """Return a row as it is printed."""
    if "absent" in row:
        return f"{key}: absent ({row['absent']})"
    if "error" in row:
        return f"{key}: {row['error']}"
    if "ns" in row:
        spread = f"{row['least']:.4f} to {row['most']:.4f}"
        moves = f"{row['bytes']:.2f} bytes a parameter at {row['share']:.0%} of a copy's rate"
        return f"{key}: {row['ns']:.4f} ns a parameter ({spread}), {moves}; first step {row['first']:.1f} s"
    if "wrong" in row:
        what = "\n".join(row["wrong"])
        return f"{key}: {row.get('said') or row['cases']}, {len(row['wrong'])} wrong {what}".rstrip()
    return f"{key}: " + ", ".join(f"{name} {x:.4g}" for name, x in row.items())


def taken(make: Callable[[], Row]) -> Row:
    """Return a row; what a peer lacks, or a device cannot do, is a row too."""
    try:
        return make()
    except ImportError as error:
        return {"absent": str(error)[:200]}
    except Exception as error:  # a peer may not run here
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    """Take the rows that are missing; return 1 if a bit differs."""
    parser = argparse.ArgumentParser(description="Time and bits of steps on a device.")
    parser.add_argument("--device", default="cuda", help='of torch; "cpu" for both frameworks there')
    parser.add_argument("--small", action="store_true", help="few steps on small arrays")
    parser.add_argument("--minutes", type=float, default=1e6, help="after which no other row is begun")
    parser.add_argument("--only", default="", help="rows whose names have this")
    parser.add_argument("--json", type=pathlib.Path, help="the record, with which a later run goes on")
    arguments = parser.parse_args(argv)
    device, small = arguments.device, arguments.small
    if reason := why_absent(device):
        print(f"gpu.py: {reason} Or use --device cpu --small.")
        return 2
    end = time.monotonic() + 60 * arguments.minutes
    record: Row = {"device": device, "machines": [], "rows": {}}
    if arguments.json and arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    rows: dict[str, Row] = record["rows"]
    if (here := machine(device)) not in record["machines"]:
        record["machines"].append(here)
    print("\n".join(f"{name}: {x}" for name, x in here.items()), flush=True)

    def asked() -> Rows:
        yield "copy", lambda: copy_row(device, small, 3 if small else 20)
        yield from time_rows(device, small, lambda: rows["copy"])
        width = 64 if small else 8192
        yield "gradients released", lambda: way_row(device, width, "released")
        if device == "cuda":
            yield "CUDA graph of the model", lambda: way_row(device, width, "graph")
        yield from bit_rows(device, small, lambda: end - time.monotonic())

    for key, make in asked():
        if arguments.only not in key and key != "copy":
            continue
        if key not in rows or "error" in rows[key]:
            if time.monotonic() > end:
                print(f"{arguments.minutes} minutes are over; the next run begins with: {key}")
                break
            rows[key] = {**taken(make), "machine": record["machines"].index(here)}
            print(line(key, rows[key]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [key for key, row in rows.items() if row.get("wrong") or row.get("differ")]
    print(f"{len(rows)} rows" + "".join(f"\na bit differs: {key}" for key in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
