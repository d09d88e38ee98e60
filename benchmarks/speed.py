"""Time optimizer steps, interleaved, beside a copy of the bytes that they move and beside other libraries.

    python benchmarks/speed.py step [--rounds 15] [--only TEXT ...] [--threads 1] [--json NAME.json]
    python benchmarks/speed.py bridge [--json NAME.json]
    make peers-speed

*step*: ours, Optax and torch's fused AdamW on large arrays; torch's steps of 300 short arrays; and every way
to store a moment or a weight, against the default of the same package. *bridge*: a step through
`OptaxOptimizer` beside the same transform in JAX, which may write new weights and state over the old ones.
*peers*: every optimizer of `peers.py` with bfloat16 weights and gradients.

The rows of a layout run interleaved, each layout in a process of its own: memory that others have used and
freed would slow down steps with temporaries. Printed are the median and the least nanoseconds per parameter,
the processor time behind the median (of all threads, divided by their number: steadier on a shared machine),
and ratios. Rows of *bridge* are in milliseconds per step.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import logging
import math
import multiprocessing
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import torch
from timing import (
    Contender,
    copy_contender,
    in_quiet_process,
    jax_contender,
    machine,
    measure,
    torch_contender,
)

import halfstep_jax
import halfstep_torch
from halfstep_spec import PARAM_STORAGES
from report import print_table

Shapes = list[tuple[int, ...]]
NUMBERS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}
RATE = {"lr": 1e-4, "weight_decay": 0.1}
PACKAGES = ("JAX storages", "torch storages")
LIMIT = 120  # HeavyBall compiles 300 arrays into a single program, which takes many minutes.
COPY, FUSED = "copy of 14 bytes", "torch AdamW(fused)"


def _lengths(low: int, high: int) -> Shapes:
    return [(n,) for n in np.random.default_rng(0).integers(low, high + 1, 300).tolist()]


LAYOUTS: dict[str, dict[str, Shapes]] = {
    "step": {
        "1 x 16M": [(4096, 4096)],
        "100 x 160k": [(400, 400)] * 100,
        "300 x 1k to 50k": _lengths(1_000, 50_000),
        "300 x 64 to 4k": _lengths(64, 4_000),
        **{package: [(2048, 2048)] for package in PACKAGES},
    },
    # Muon multiplies matrices: of two million elements for seconds.
    "bridge": {"1 x 2M": [(2048, 1024)], "30 x 4k": [(64, 64)] * 30},
    "peers": {"1 x 16M": [(4096, 4096)], "300 x 8k to 64k": [(64, 128), (128, 256), (256, 256)] * 100},
}
"""By subject and name: the shapes of the weights."""
ROUNDS = {"step": 15, "bridge": 25, "peers": 9}


def _torch_adamw(**options: Any) -> Callable:
    return lambda params: torch.optim.AdamW(params, **RATE, **options)


def _ours_in_torch(**options: Any) -> Callable:
    return lambda params: halfstep_torch.AdamW(params, **RATE, compile=True, **options)


def of_large_arrays(shapes: Shapes) -> list[Contender]:
    """Return a copy, and AdamW of Optax, of torch and ours, in float32 and in bfloat16."""
    forced = {"param_storage": "nearest", "nu_rounding": "nearest_unchecked"}
    peer, ours = (
        functools.partial(make, 1e-4, weight_decay=0.1) for make in (optax.adamw, halfstep_jax.adamw)
    )
    f32, bf16 = ("float32", 28), ("bfloat16", 14)
    entries = [copy_contender(moved, len(shapes), shapes[0]) for moved in (14, 28)]
    in_jax = {
        ("optax.adamw", ""): (peer(), (f32, bf16)),
        ("halfstep_jax.adamw", ""): (ours(), (f32,)),
        ("halfstep_jax.adamw", ", nearest"): (ours(**forced), (bf16,)),
        ("halfstep_jax.adamw", " (default)"): (ours(), (bf16,)),
    }
    for (name, how), (tx, dtypes) in in_jax.items():
        for dtype, moved in dtypes:
            name_of = f"{name}, {dtype}{how}"
            entries.append(jax_contender(name_of, tx, dtype, len(shapes), shapes[0], moved))
    in_torch = {
        ("torch AdamW(fused)", ""): (_torch_adamw(fused=True), (f32, bf16)),
        ("halfstep_torch.AdamW", ""): (_ours_in_torch(), (f32,)),
        ("halfstep_torch.AdamW", ", nearest"): (_ours_in_torch(**forced), (bf16,)),
        ("halfstep_torch.AdamW", " (default)"): (_ours_in_torch(), (bf16,)),
    }
    for (name, how), (make, dtypes) in in_torch.items():
        for dtype, moved in dtypes:
            of_dtype = getattr(torch, dtype)
            entries.append(torch_contender(f"{name}, {dtype}{how}", make, of_dtype, shapes, moved))
    return entries


def of_many_arrays(shapes: Shapes) -> list[Contender]:
    """Return torch's steps of many short arrays in bfloat16: what a call for each of them costs."""
    scaled = {"min_size": 128, "min_ndim": 1}
    fp8 = {
        "mu_dtype": halfstep_torch.scaled("float8_e4m3fn", **scaled),
        "nu_dtype": halfstep_torch.scaled("ufloat8_e5m3", **scaled),
    }
    makes = {
        "torch AdamW(foreach)": _torch_adamw(foreach=True),
        "torch AdamW(fused)": _torch_adamw(fused=True),
        "halfstep_torch.AdamW (default)": _ours_in_torch(),
        "halfstep_torch.AdamW, fp8": _ours_in_torch(**fp8),
    }
    entries = [torch_contender(name, make, torch.bfloat16, shapes, 14) for name, make in makes.items()]
    return [copy_contender(14, 1, (1, _size(shapes))), *entries]


def storages(hs) -> dict[str, dict]:
    """Return the options of every format and weight rule; `hs` is either package."""
    bf16 = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
    fp8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    by_row = {
        "mu_dtype": hs.scaled("float8_e4m3fn", "row"),
        "nu_dtype": hs.scaled("ufloat8_e5m3", "row"),
    }
    rules = [name for name in PARAM_STORAGES if name != "stochastic"]
    return {
        "bfloat16 (default)": bf16,
        "nu scaled float16": bf16 | {"nu_dtype": hs.scaled("float16")},
        "one_pass: mulaw8, uroot4_e4m4": hs.recipes.one_pass,
        "eight_bit: relative e3m4 with feedback, uroot8": hs.recipes.eight_bit,
        "relative int8, ufloat8_e5m3": {"mu_dtype": hs.relative("int8", 128), "nu_dtype": fp8["nu_dtype"]},
        "four_bit: relative int4 with feedback, uroot8": hs.recipes.four_bit,
        "fp8: e4m3fn, ufloat8_e5m3": fp8,
        "fp8 by row": by_row,
        "fp8: e4m3fn, e4m3fn": {name: hs.scaled("float8_e4m3fn") for name in fp8},
        "int8, ufloat8_e5m3": {"mu_dtype": hs.scaled("int8"), "nu_dtype": hs.scaled("ufloat8_e5m3")},
        "8-bit tables": {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")},
        **{f"bfloat16, {rule}": bf16 | {"param_storage": rule} for rule in (*rules, "feedback")},
        "fp8, split16": fp8 | {"param_storage": "split16"},
    }


def of_storages(shapes: Shapes, package: str) -> list[Contender]:
    """Return a contender of a package for every way to store moments and weights."""
    if package == PACKAGES[0]:
        chosen = {
            name: halfstep_jax.adamw(1e-4, weight_decay=0.1, **options)
            for name, options in storages(halfstep_jax).items()
        }
        return [jax_contender(name, tx, jnp.bfloat16, 1, shapes[0], 0) for name, tx in chosen.items()]
    return [
        torch_contender(name, _ours_in_torch(**options), torch.bfloat16, shapes, 0)
        for name, options in storages(halfstep_torch).items()
    ]


def through_bridge(shapes: Shapes) -> list[Contender]:
    """Return native torch optimizers, and each transform in JAX and through `OptaxOptimizer`."""
    from halfstep_torch.bridge import OptaxOptimizer

    def named(params: Sequence) -> list:
        return [(f"w{i}", p) for i, p in enumerate(params)]

    muon = optax.contrib.muon(1e-3)
    transforms = {"optax.adamw": optax.adamw(1e-3), "halfstep_jax.adamw": halfstep_jax.adamw(1e-3)}
    if len(shapes) > 1:
        narrow = halfstep_jax.store_state(muon, halfstep_jax.scaled("float8_e4m3fn"))
        transforms |= {"muon": muon, "store_state(muon, fp8)": narrow}
    entries = [torch_contender(name, make, torch.bfloat16, shapes, 0) for name, make in NATIVE.items()]
    for name, tx in transforms.items():
        make = lambda params, tx=tx: OptaxOptimizer(named(params), tx)  # noqa: E731
        entries += [
            jax_contender(f"{name}, in JAX", tx, jnp.bfloat16, len(shapes), shapes[0], 0),
            torch_contender(f"{name}, OptaxOptimizer", make, torch.bfloat16, shapes, 0),
        ]
    return entries


NATIVE: dict[str, Callable] = {
    "torch.optim.AdamW(fused)": lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
    "halfstep_torch.AdamW": lambda params: halfstep_torch.AdamW(params, 1e-3, compile=True),
}


def _peer_in_torch(entry: Any, shapes: Sequence[tuple[int, ...]]) -> Contender:
    """Return a step in torch; gradients are set anew before each: some libraries drop or overwrite them."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    params, grads = [torch.nn.Parameter(w) for w in weights], [w * 1e-2 for w in weights]
    kept = [torch.empty_like(g) for g in grads]
    optimizer = entry.make(params, **NUMBERS, **entry.arguments[0])

    def prepare():
        torch._foreach_copy_(kept, grads)
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad

    return Contender(entry.name, 14, optimizer.step, prepare=prepare)


def _peer_in_jax(entry: Any, shapes: Sequence[tuple[int, ...]]) -> Contender:
    """Return a step in JAX, jitted, with weights and state donated."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        f"w{i}": jax.random.normal(k, s, jnp.bfloat16)
        for i, (k, s) in enumerate(zip(keys, shapes, strict=True))
    }
    grads = {name: p * jnp.bfloat16(1e-2) for name, p in params.items()}
    init, update = entry.make(**NUMBERS)
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


def of_peers(shapes: Shapes) -> tuple[list[Contender], dict[str, str]]:
    """Return a copy and every optimizer that takes a step, and why the others take none."""
    import peers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    entries, failed = [copy_contender(14, 1, (1, _size(shapes)))], {}
    for entry in (entry for entry in peers.entries() if entry.timed):
        make = _peer_in_torch if entry.framework == "torch" else _peer_in_jax
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


def _size(shapes: Shapes) -> int:
    return int(sum(map(np.prod, shapes)))


def contenders(subject: str, layout: str) -> tuple[list[Contender], dict[str, str]]:
    """Return everything that is timed for a layout, and why the rest is not."""
    shapes = LAYOUTS[subject][layout]
    if subject == "peers":
        return of_peers(shapes)
    if subject == "bridge":
        return through_bridge(shapes), {}
    if layout in PACKAGES:
        return of_storages(shapes, layout), {}
    return (of_large_arrays if len(set(shapes)) == 1 else of_many_arrays)(shapes), {}


def ratios(subject: str, layout: str, entry: Contender, entries: list[Contender]) -> dict[str, float]:
    """Return what a row is relative to: copies of as many bytes, the default of its package, or a peer."""
    of = {other.name: other.figures for other in entries}
    if subject == "bridge":
        return {}
    if subject == "peers":
        ns = entry.figures["ns"]
        return {"x copy": ns / of[COPY]["ns"], "x fused": ns / of[FUSED]["ns"]}
    if layout in PACKAGES:
        # By processor time: what another process takes is not in it.
        return {"x": entry.figures["cpu"] / entries[0].figures["cpu"]}
    return {"x": entry.figures["ns"] / of[f"copy of {entry.bytes} bytes"]["ns"]}


def timed(subject: str, layout: str, rounds: int, threads: int) -> list[dict]:
    """Time a layout; print the rows and return them."""
    torch.set_num_threads(threads)
    entries, failed = contenders(subject, layout)
    # A bridge's time is of a step: in units of a million nanoseconds, of all threads together.
    whole = subject == "bridge"
    measure(entries, rounds, 1_000_000 if whole else _size(LAYOUTS[subject][layout]), 1 if whole else threads)
    unit = "ms" if whole else "ns"
    rows = [
        {"layout": layout, "name": entry.name}
        | {unit if key == "ns" else key: value for key, value in entry.figures.items()}
        | ratios(subject, layout, entry, entries)
        for entry in entries
    ]
    keys = [key for key in rows[0] if key not in ("layout", "name")]
    print_table(
        f"<{layout} | {' | '.join(keys)}",
        ((row["name"], *(f"{row[key]:.2f}" for key in keys)) for row in rows),
    )
    return rows + [{"layout": layout, "name": name, "does not run": why} for name, why in failed.items()]


def about(subject: str, threads: int) -> dict[str, Any]:
    """Return what the figures of a subject depend on."""
    found = {"date": datetime.date.today().isoformat(), "machine": machine(threads)}
    if subject == "peers":
        import peers

        packages = sorted({entry.distribution for entry in peers.entries()} - {"halfstep"})
        found["machine"]["versions"] |= {name: importlib.metadata.version(name) for name in packages}
    return found


def main() -> int:
    """Run a subject, in processes whose thread settings stood before they began."""
    threads = in_quiet_process()
    parser = argparse.ArgumentParser(description="Time optimizer steps, interleaved in one run.")
    parser.add_argument("subject", choices=LAYOUTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", default=[""], help="layouts in whose names one of these stands")
    parser.add_argument("--threads", type=int, default=threads, help="of torch; JAX takes all there are")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    subject, rounds = arguments.subject, arguments.rounds or ROUNDS[arguments.subject]
    names = [name for name in LAYOUTS[subject] if any(text in name for text in arguments.only)]
    rows: list[dict] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            rows += pool.apply(timed, (subject, name, rounds, arguments.threads))
    if arguments.json:
        record = about(subject, arguments.threads) | {"rounds": rounds, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(math.isfinite(row[unit]) for row in rows for unit in ("ns", "ms") if unit in row))


if __name__ == "__main__":
    sys.exit(main())
