"""Two processes that train together over gloo."""

import os
import pathlib
from collections.abc import Callable

import torch
import torch.distributed as dist

PROCESSES = 2


def in_two_processes(folder: pathlib.Path, *checks: Callable[[int], None]) -> None:
    """Run each check in both processes, with its rank; what one raises is raised here."""
    torch.multiprocessing.spawn(_in_one_process, (str(folder / "store"), checks), nprocs=PROCESSES)


def _in_one_process(rank: int, path: str, checks: tuple[Callable[[int], None], ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=PROCESSES)
    try:
        for check in checks:
            check(rank)
    finally:
        dist.destroy_process_group()
    # A thread of gloo that lets go of a tensor while Python finalizes aborts the process
    # (pytorch/pytorch#190489): what was to be checked is checked, so Python is left without finalizing.
    os._exit(0)
