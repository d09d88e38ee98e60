"""Some processes that train together over gloo. They stay for the next test: to start them is what costs."""

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

# A collective that some process never joins is an error, and soon.
_TIMEOUT = datetime.timedelta(seconds=60)
Check = Callable[[int], None]


def in_processes(count: int, *checks: Check) -> None:
    """Run each check in so many processes, with its rank; what one raises fails the test."""
    group = _STAYING.pop(count, None) or _Group(count)
    try:
        group.run(checks)
    except AssertionError:
        group.end()  # processes that did not fail may wait in the check
        raise
    _STAYING[count] = group


def in_fresh_processes(count: int, *checks: Check) -> None:
    """Run checks that leave something behind, such as libraries of others."""
    group = _Group(count)
    try:
        group.run(checks)
    finally:
        group.end()


class _Group:
    """Processes that run what they are given, until they are ended."""

    def __init__(self, count: int):
        context, store = multiprocessing.get_context("spawn"), tempfile.mktemp()
        self._ends, self._processes = [], []
        for rank in range(count):
            end, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, store, other), daemon=True)
            process.start()
            other.close()
            self._ends.append(end)
            self._processes.append(process)

    def run(self, checks: tuple[Check, ...]) -> None:
        for end in self._ends:
            end.send(checks)
        running = list(self._ends)
        while running:
            for end in wait(running):
                assert isinstance(end, Connection)
                running.remove(end)
                try:
                    problem = end.recv()
                except EOFError:
                    problem = "it has ended"
                assert not problem, f"process {self._ends.index(end)}: {problem}"

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


_STAYING: dict[int, _Group] = {}


def _serve(rank: int, count: int, path: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=_TIMEOUT
    )
    while True:
        try:
            for check in end.recv():
                check(rank)
            end.send("")
        except EOFError:
            return
        except BaseException:  # that of pytest.raises, too
            end.send(traceback.format_exc())
