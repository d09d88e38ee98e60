"""Time an optimizer step against peers, and against copying the bytes that it must move.

    python benchmarks/step.py [--rounds 15] [--many] [--storages TEXT ...] [--threads 1] [--json NAME.json]

The rows of a table run interleaved, in a process of their own. Prints the median nanoseconds per parameter
and step, the processor time behind it (of all threads, divided by their number: steadier on a shared
machine), and the ratio to a copy of as many bytes. Then torch's steps of 300 short arrays. The last tables
have a row for every way to store a moment or a weight, against the default of the same package: what saves
memory costs time.
"""

import argparse
import json
import multiprocessing
import pathlib
import statistics
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax
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

LAYOUTS = {"1 x 16M": (1, (4096, 4096)), "100 x 160k": (100, (400, 400))}
MANY = {"300 x 1k to 50k": (1_000, 50_000), "300 x 64 to 4k": (64, 4_000)}
STORED = (2048, 2048)
PACKAGES = ("JAX", "torch")
_LR, _DECAY = 1e-4, 0.1


def contenders(layout: str) -> list[Contender]:
    """Return everything that is timed for a layout."""
    leaves, shape = LAYOUTS[layout]
    f32, bf16 = (jnp.float32, torch.float32), (jnp.bfloat16, torch.bfloat16)

    def on_jax(name, tx, dtypes, moved):
        return jax_contender(name, tx, dtypes[0], leaves, shape, moved)

    def on_torch(name, make, dtypes, moved):
        return torch_contender(name, make, dtypes[1], [shape] * leaves, moved)

    def fused(params):
        return torch.optim.AdamW(params, lr=_LR, weight_decay=_DECAY, fused=True)

    def ours(**options):
        return lambda params: halfstep_torch.AdamW(params, lr=_LR, weight_decay=_DECAY, **options)

    peer, adamw = optax.adamw(_LR, weight_decay=_DECAY), halfstep_jax.adamw
    forced = {"param_storage": "nearest", "nu_rounding": "nearest_unchecked"}
    return [
        copy_contender(14, leaves, shape),
        copy_contender(28, leaves, shape),
        on_jax("optax.adamw, float32", peer, f32, 28),
        on_jax("optax.adamw, bfloat16", peer, bf16, 14),
        on_jax("halfstep_jax.adamw, float32", adamw(_LR, weight_decay=_DECAY), f32, 28),
        on_jax("halfstep_jax.adamw, bfloat16, nearest", adamw(_LR, weight_decay=_DECAY, **forced), bf16, 14),
        on_jax("halfstep_jax.adamw, bfloat16 (default)", adamw(_LR, weight_decay=_DECAY), bf16, 14),
        on_torch("torch AdamW(fused), float32", fused, f32, 28),
        on_torch("torch AdamW(fused), bfloat16", fused, bf16, 14),
        on_torch("halfstep_torch.AdamW, float32", ours(compile=True), f32, 28),
        on_torch("halfstep_torch.AdamW, bfloat16, nearest", ours(compile=True, **forced), bf16, 14),
        on_torch("halfstep_torch.AdamW, bfloat16 (default)", ours(compile=True), bf16, 14),
    ]


def lengths(layout: str) -> list[int]:
    """Return the lengths of the many arrays of a layout."""
    shortest, longest = MANY[layout]
    return np.random.default_rng(0).integers(shortest, longest + 1, 300).tolist()


def many_contenders(layout: str) -> list[Contender]:
    """Return torch's steps of many short arrays in bfloat16: what a call for each of them costs."""
    shapes = [(length,) for length in lengths(layout)]
    scaled = {"min_size": 128, "min_ndim": 1}
    fp8 = {
        "mu_dtype": halfstep_torch.scaled("float8_e4m3fn", **scaled),
        "nu_dtype": halfstep_torch.scaled("ufloat8_e5m3", **scaled),
    }

    def peer(**options):
        return lambda params: torch.optim.AdamW(params, lr=_LR, weight_decay=_DECAY, **options)

    def ours(**options):
        return lambda params: halfstep_torch.AdamW(
            params, lr=_LR, weight_decay=_DECAY, compile=True, **options
        )

    makes = {
        "torch AdamW(foreach)": peer(foreach=True),
        "torch AdamW(fused)": peer(fused=True),
        "halfstep_torch.AdamW (default)": ours(),
        "halfstep_torch.AdamW, fp8": ours(**fp8),
    }
    entries = [torch_contender(name, make, torch.bfloat16, shapes, 14) for name, make in makes.items()]
    return [copy_contender(14, 1, (1, sum(lengths(layout)))), *entries]


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
        "nu ufloat8_e6m2": bf16 | {"nu_dtype": "ufloat8_e6m2"},
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


def storage_contenders(package: str, only: Sequence[str] = ()) -> list[Contender]:
    """Return a contender for every way to store moments and weights; or the first, and those `only` names."""
    module = halfstep_jax if package == "JAX" else halfstep_torch
    first, *others = storages(module).items()
    chosen = [first, *(x for x in others if not only or any(text in x[0] for text in only))]
    if package == "JAX":
        return [
            jax_contender(
                name,
                halfstep_jax.adamw(_LR, weight_decay=_DECAY, **options),
                jnp.bfloat16,
                1,
                STORED,
                0,
            )
            for name, options in chosen
        ]

    def make(options):
        return lambda params: halfstep_torch.AdamW(
            params, lr=_LR, weight_decay=_DECAY, compile=True, **options
        )

    return [torch_contender(name, make(options), torch.bfloat16, [STORED], 0) for name, options in chosen]


def storage_table(package: str, entries: list[Contender]) -> list[dict]:
    """Print the rows of a package and return them; the first is what the others are held against."""
    print(f"\n{package + ', 1 x 4M, every storage':44}{'ns/param':>10}{'min':>8}{'cpu/threads':>13}{'x':>8}")
    rows = []
    for entry in entries:
        row = entry.figures
        # By processor time: what another process takes is not in it.
        ratio = row["cpu"] / entries[0].figures["cpu"]
        print(f"{entry.name:44}{row['ns']:10.3f}{row['min']:8.3f}{row['cpu']:13.3f}{ratio:8.2f}")
        rows.append({"layout": f"{package} storages", "name": entry.name, **row, "x": ratio})
    return rows


def table(layout: str, entries: list[Contender]) -> list[dict]:
    """Print the rows of a layout and return them."""
    copies = {
        entry.bytes: statistics.median(entry.wall) for entry in entries if entry.name.startswith("copy")
    }
    print(f"\n{layout:44}{'ns/param':>10}{'min':>8}{'cpu/threads':>13}{'bytes':>7}{'x copy':>8}")
    rows = []
    for entry in entries:
        row = entry.figures
        ratio = row["ns"] / copies[entry.bytes]
        print(
            f"{entry.name:44}{row['ns']:10.3f}{row['min']:8.3f}{row['cpu']:13.3f}{entry.bytes:7d}{ratio:8.2f}"
        )
        rows.append({"layout": layout, "name": entry.name, **row, "x": ratio})
    return rows


def ratios(rows: list[dict]) -> None:
    """Print ours against each peer."""
    ns = {(row["layout"], row["name"]): row["ns"] for row in rows}
    pairs = {
        "halfstep_jax.adamw, bfloat16 (default)": ("optax.adamw, bfloat16", "optax.adamw, float32"),
        "halfstep_torch.AdamW, bfloat16 (default)": (
            "torch AdamW(fused), bfloat16",
            "torch AdamW(fused), float32",
        ),
    }
    print()
    for layout in dict.fromkeys(row["layout"] for row in rows):
        for ours, peers in pairs.items():
            for peer in peers:
                print(f"{layout}: {ours} / {peer} = {ns[layout, ours] / ns[layout, peer]:.2f}")


def against(rows: list[dict], peers: tuple[str, ...]) -> None:
    """Print our rows of one layout against each peer: wall time, and processor time."""
    of = {row["name"]: row for row in rows}
    for name, ours in of.items():
        for peer in peers if name.startswith("halfstep") else ():
            wall, cpu = (ours[time] / of[peer][time] for time in ("ns", "cpu"))
            print(f"{name} / {peer} = {wall:.2f}, processor time {cpu:.2f}")


def timed(name: str, rounds: int, threads: int, only: Sequence[str]) -> list[dict]:
    """Time a layout, or `only` some storages of a package; print the rows and return them."""
    torch.set_num_threads(threads)
    if name in LAYOUTS:
        leaves, shape = LAYOUTS[name]
        entries, size = contenders(name), leaves * int(np.prod(shape))
    elif name in MANY:
        entries, size = many_contenders(name), sum(lengths(name))
    else:
        entries, size = storage_contenders(name, only), int(np.prod(STORED))
    measure(entries, rounds, size, threads)
    if name in PACKAGES:
        return storage_table(name, entries)
    rows = table(name, entries)
    if name in MANY:
        against(rows, ("torch AdamW(foreach)", "torch AdamW(fused)"))
    return rows


def main() -> None:
    """Run the benchmark, in processes whose thread settings stood before they began."""
    threads = in_quiet_process()
    parser = argparse.ArgumentParser(
        description="Time optimizer steps against peers, interleaved in one run."
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("--threads", type=int, default=threads, help="of torch; JAX takes all there are")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--storages", nargs="*", help="only the rows of storages; of those with such a text")
    only.add_argument("--many", action="store_true", help="only the rows of 300 arrays")
    arguments = parser.parse_args()
    threads, storages = arguments.threads, arguments.storages
    print(machine(threads), flush=True)
    names = PACKAGES if storages is not None else MANY if arguments.many else (*LAYOUTS, *MANY, *PACKAGES)
    rows: list[dict] = []
    # A process for each: memory that others have used and freed would slow down steps with temporaries.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            rows += pool.apply(timed, (name, arguments.rounds, threads, storages or ()))
    ratios([row for row in rows if row["layout"] in LAYOUTS])
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(threads), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
