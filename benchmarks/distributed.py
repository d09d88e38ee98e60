"""The time of a step of shards, and what they send for it: 1, 2 and 4 processes, beside torch's fused AdamW.

    python benchmarks/distributed.py

All processes share this machine over gloo, a thread each, so times are of the processor, of all threads of a
process: waiting for others costs nothing. Ours runs eagerly, torch's AdamW fused. In every round each
optimizer steps its shards, and then the same weights whole, as one process would: "of its share" is the
median of P times the first over the second.
"""

import contextlib
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import halfstep_torch as hs
import report

PROCESSES = (1, 2, 4)
# Blocks of 128 lie along rows, so borders between rows cut none, and those between columns cut some:
# 1376 / 2 = 5 3/8 blocks.
LEAVES, SHAPE = 4, (1024, 1376)
AXES = {"rows": 0, "columns": 1}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "halfstep": functools.partial(hs.AdamW, compile=False),
    "halfstep, 8 bits": functools.partial(
        hs.AdamW, compile=False, mu_dtype=hs.scaled("int8"), nu_dtype=hs.scaled("uroot8")
    ),
}


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Note the bytes of every tensor that this process brings to a collective."""
    names, sizes, before = ("all_reduce", "all_gather"), [], {}

    def noted(collective: Callable) -> Callable:
        def call(*tensors: Any, **options: Any) -> Any:
            sent = next(x for x in reversed(tensors) if isinstance(x, torch.Tensor))
            sizes.append(sent.numel() * sent.element_size())
            return collective(*tensors, **options)

        return call

    for name in names:
        before[name] = getattr(dist, name)
        setattr(dist, name, noted(before[name]))
    try:
        yield sizes
    finally:
        for name in names:
            setattr(dist, name, before[name])


def made(make: Callable[..., Any], shape: tuple[int, int], place: Callable = lambda x: x) -> Any:
    """Return an optimizer of some weights, with gradients."""
    params = [torch.nn.Parameter(place(torch.ones(shape, dtype=torch.bfloat16))) for _ in range(LEAVES)]
    for p in params:
        p.grad = place(torch.full(shape, 0.01, dtype=torch.bfloat16))
    return make([(f"w{i}", p) for i, p in enumerate(params)], lr=1e-3)


def processor_time(optimizer: Any) -> float:
    """Return the seconds that the threads of this process work at a step."""
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def measure(rank: int, count: int, folder: str, rounds: int, shape: tuple[int, int]) -> None:
    """Leave the figures of so many processes in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{count}", rank=rank, world_size=count)
    mesh, rows = init_device_mesh("cpu", (count,)), []
    for along, axis in AXES.items():
        place = functools.partial(
            distribute_tensor, device_mesh=mesh, placements=[Shard(axis)], src_data_rank=None
        )
        optimizers = {
            name: (made(make, shape, place), made(make, shape)) for name, make in OPTIMIZERS.items()
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
        for optimizer, alone in optimizers.values():
            optimizer.step()  # which compares, and makes state
            alone.step()
        for _ in range(rounds):
            for name, pair in optimizers.items():
                dist.barrier()
                times[name].append(tuple(processor_time(optimizer) for optimizer in pair))
        for name, (optimizer, _) in optimizers.items():
            with counted() as sizes:
                optimizer.step()
            ours, alone = zip(*times[name], strict=True)
            ratio = statistics.median(count * x / y for x, y in times[name])
            figures = {
                "ms": 1e3 * statistics.median(ours),
                "alone": 1e3 * statistics.median(alone),
                "ratio": ratio,
            }
            sent = {"collectives": len(sizes), "bytes": sum(sizes)}
            rows.append({"processes": count, "cut": along, "optimizer": name, **figures, **sent})
    if rank == 0:
        pathlib.Path(folder, f"{count}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo may abort a process that finalizes (pytorch/pytorch#190489)


def claims(rows: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence."""
    ours = [row for row in rows if "halfstep" in row["optimizer"]]
    silent = [row for row in ours if row["cut"] == "rows" or row["optimizer"] == "halfstep"]
    return {
        "without a cut block, processes exchange nothing": not any(row["collectives"] for row in silent),
    }


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Steps of shards: time, and what is sent.", steps=12)
    rows: list[dict] = []
    for count in PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            options = (count, folder, arguments.steps, SHAPE)
            torch.multiprocessing.spawn(measure, options, nprocs=count)
            rows += json.loads(pathlib.Path(folder, f"{count}.json").read_text())
    for row in rows:
        row["blocks"] = SHAPE[0] * -(-SHAPE[1] // 128)
    report.print_table(
        "processes | <cut between | <optimizer | ms | ms alone | of its share | collectives | bytes sent",
        (
            (
                row["processes"],
                row["cut"],
                row["optimizer"],
                f"{row['ms']:.1f}",
                f"{row['alone']:.1f}",
                f"{row['ratio']:.2f}",
                row["collectives"],
                f"{row['bytes']:,}",
            )
            for row in rows
        ),
    )
    figures = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[1]}
    figures |= {"leaves": LEAVES, "shape": SHAPE, "rows": rows}
    return report.finish(claims(rows), figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
