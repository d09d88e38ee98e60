"""Some processes that train together over gloo."""

import datetime
import os
import pathlib
from collections.abc import Callable

import torch
import torch.distributed as dist

# A collective that some process never joins is an error, and soon.
_TIMEOUT = datetime.timedelta(seconds=60)


def in_processes(folder: pathlib.Path, count: int, *checks: Callable[[int], None]) -> None:
    """Run each check in so many processes, with its rank; what one raises is raised here."""
    folder.mkdir(exist_ok=True)
    torch.multiprocessing.spawn(_in_one_process, (str(folder / "store"), count, checks), nprocs=count)


def _in_one_process(rank: int, path: str, count: int, checks: tuple[Callable[[int], None], ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=_TIMEOUT
    )
    try:
        for check in checks:
            check(rank)
    finally:
        dist.destroy_process_group()
    # A thread of gloo that lets go of a tensor while Python finalizes aborts the process
    # (pytorch/pytorch#190489): what was to be checked is checked, so Python is left without finalizing.
    os._exit(0)
