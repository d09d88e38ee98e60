"""What breaks in silence: ours and other libraries' optimizers, measured alike.

    make peers
    python benchmarks/silent_failures.py [--only NAME ...] [--rows KEY ...] [--json NAME.json]

Measures every row of `failures.py`, `same_bits.py` and `small_network.py` for every optimizer of `peers.py`,
on a CPU. A figure is printed as it is measured, bold outside the bounds of its row. An optimizer that cannot
run here is listed with the reason. The exit status is 1 if one of ours is outside a bound and `SHORTFALLS`
does not say so, or if it says so wrongly.
"""

import argparse
import datetime
import json
import logging
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import warnings

import comparison
import failures  # noqa: F401 (its rows are registered, as those of small_network)
import jax
import numpy as np
import peers
import same_bits
import small_network  # noqa: F401
import torch
from experiments import ROWS, pool, weights

_RANGE = "its second moment has no scale, and a range for gradients of 4e-8 to 130"
_FEEDBACK = (
    "a step takes back nine times the rounding error of its first moment, so the largest movement is longer"
)
SHORTFALLS = {
    (
        "drop",
        "halfstep_torch, one_pass",
    ): "neighbouring numbers of its second moment are up to a quarter apart",
    ("sizes", "halfstep_torch, one_pass"): _RANGE,
    ("spike", "halfstep_torch, one_pass"): f"{_RANGE}; clipped, the gaps between its numbers",
    ("spike", "halfstep_torch, eight_bit"): _FEEDBACK,
    ("spike", "halfstep_torch, four_bit"): _FEEDBACK,
}
"""What is outside a bound of ours, by row and name, with the reason."""


def reason(error: Exception) -> str:
    """Return what went wrong, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".strip(": ")


def runnable(entries: list[peers.Entry]) -> tuple[list[peers.Entry], dict[str, str]]:
    """Return what takes a step here, and the reasons of what does not."""
    kept, refused = [], {}
    for entry in entries:
        try:
            run = entry.start(weights())
            run.step(run.native(pool()[0]))
            kept.append(entry)
        except Exception as error:
            refused[entry.name] = reason(error) + (f"; {entry.needs}" if entry.needs else "")
    return kept, refused


def write_replicas(entries: list[peers.Entry], path: pathlib.Path) -> None:
    """In the second process: write the bits with which every optimizer ends."""
    mesh = jax.make_mesh((2,), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    bits = {}
    for entry in entries:
        try:
            ends = [same_bits.replica(entry, seed, rows) for seed in same_bits.SEEDS]
            bits[entry.name] = np.stack(ends).view(np.int16)
        except Exception as error:
            print(f"{entry.name}: {reason(error)}", file=sys.stderr)
    np.savez(path, **bits)


def read_replicas(names: list[str]) -> dict[str, np.ndarray]:
    """Start the second process and return the bits that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "replicas.npz"
        devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        command = [sys.executable, __file__, "--replica", str(path), "--only", *names]
        subprocess.run(command, check=True, env={**os.environ, **devices})
        with np.load(path) as bits:
            return dict(bits)


def measured(entries: list[peers.Entry], keys: list[str]) -> dict[str, dict[str, dict]]:
    """Return the figures of the rows with these keys, by key and name; of what failed, the reason."""
    figures = {row.key: {} for row in ROWS}
    for row in [row for row in ROWS if row.key in keys]:
        for entry in entries:
            if row.moment and entry.second is None:
                continue
            start = time.perf_counter()
            try:
                figures[row.key][entry.name] = row.measure(entry)
            except Exception as error:
                figures[row.key][entry.name] = {"failed": reason(error)}
            print(
                f"{row.key}: {entry.name}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True
            )
    return figures


def claims(record: dict) -> dict[str, bool]:
    """Return, of every row, whether ours are within its bounds but for what `SHORTFALLS` names."""
    held = {}
    for row in record["rows"]:
        ours = {entry["name"] for entry in record["entries"] if entry["ours"]} & row["figures"].keys()
        outside = {name for name in ours if comparison.outside(row, row["figures"][name])}
        said = {name for key, name in SHORTFALLS if key == row["key"]} & ours
        but = f", but for {', '.join(sorted(said))}" if said else ""
        held[f"{row['title']}: ours are within the bounds{but}"] = outside == said
    return held


def replaced(record: dict, newer: dict) -> dict:
    """Return a record with the figures and the optimizers of a newer one in their place, or beside them."""
    older = {row["key"]: row["figures"] for row in record["rows"]}
    rows = [{**row, "figures": older.get(row["key"], {}) | row["figures"]} for row in newer["rows"]]
    known = {entry["name"]: entry for entry in [*record["entries"], *newer["entries"]]}
    entries = [known[entry.name] for entry in peers.entries() if entry.name in known]
    return {**record, "shortfalls": newer["shortfalls"], "entries": entries, "rows": rows}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Measure what breaks in silence, beside other libraries.")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("--only", nargs="+", help="names of optimizers, or beginnings of them")
    keys = [row.key for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=keys, default=keys, help="keys of experiments")
    parser.add_argument("--into", type=pathlib.Path, help="put the figures into this record")
    parser.add_argument("--replica", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # The libraries' own notes are not what is measured, and one thread suits arrays of this size.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    chosen = tuple(arguments.only or [""])
    entries = [entry for entry in peers.entries() if entry.name.startswith(chosen)]
    if arguments.replica:
        write_replicas(entries, arguments.replica)
        return 0
    start = time.perf_counter()
    kept, refused = runnable(entries)
    if "processes" in arguments.rows:
        same_bits.REPLICAS.update(read_replicas([entry.name for entry in kept]))
    figures = measured(kept, arguments.rows)
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": platform.machine(),
            "system": platform.system(),
            "python": platform.python_version(),
        },
        "seconds": round(time.perf_counter() - start),
        "entries": [
            {"name": entry.name, "package": f"{entry.distribution} {entry.version()}", "ours": entry.ours}
            for entry in kept
        ],
        "not run": refused,
        "shortfalls": [{"row": key, "name": name, "why": why} for (key, name), why in SHORTFALLS.items()],
        "rows": [{**row.description, "figures": figures[row.key]} for row in ROWS],
    }
    if arguments.into:
        record = replaced(json.loads(arguments.into.read_text()), record)
        arguments.into.write_text(json.dumps(record, indent=1) + "\n")
    print(comparison.data_page(record))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    held = claims(record)
    for sentence, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}: {sentence}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
