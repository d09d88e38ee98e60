"""Compiling Triton kernels in processes of their own, which leave them in Triton's cache.

Launches compile their kernels one after the other. Processes compile several at once, and take no memory of a
device: all that they need of it is its kind. Launches then find their kernels in the cache. This file is the
program of such a process too, so it imports nothing of this package.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import linecache
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import NamedTuple


class Request(NamedTuple):
    """A kernel and how it is launched, which decides what Triton compiles.

    Attributes:
        text: of the module, whose function is `step`.
        target: the arguments of Triton's `GPUTarget`.
        pointers: the dtypes of the first arguments, which are aligned to 16 bytes.
        numbers: the integers that follow.
        options: constants of the kernel, and options of the compiler.
    """

    text: str
    target: tuple[str, int | str, int]
    pointers: Sequence[str]
    numbers: Sequence[int]
    options: dict[str, int | str | bool | None]


def compile_at_once(requests: Iterable[Request | None]) -> None:
    """Compile kernels that no process has compiled before, if there are several; return when they are kept.

    A process that fails leaves its kernel to the launch, which raises the error.
    """
    new = [request for request in requests if request is not None and not _mark(request).exists()]
    if len(new) < 2:
        return
    path = os.pathsep.join(x for x in sys.path if x)
    with contextlib.ExitStack() as running:
        processes = []
        for request in new:
            process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
            running.callback(process.wait)
            running.callback(process.kill)  # which an interrupt leaves running, and one that ended ignores
            processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(OSError), process.stdin:  # of one that has ended
                process.stdin.write(json.dumps(request).encode())
        for process in processes:
            process.wait()


def _mark(request: Request) -> pathlib.Path:
    """Return the file in Triton's cache that tells that a kernel is kept there."""
    triton = importlib.import_module("triton")
    said = json.dumps([triton.__version__, request], sort_keys=True)
    return pathlib.Path(triton.knobs.cache.dir, f"halfstep_{hashlib.sha256(said.encode()).hexdigest()}")


@functools.cache
def module_of(text: str) -> ModuleType:
    """Return the module of a source. No file is written: Triton reads the source from `linecache`."""
    name = f"<halfstep kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = type(importlib)(name)
    module.__file__ = name
    run: Callable = exec
    run(compile(text, name, "exec"), module.__dict__)
    return module


class StandIn:
    """Stands for the driver of a device, for Triton to compile: nothing can be launched."""

    def __init__(self, target: Sequence[int | str]) -> None:
        self._target = importlib.import_module("triton.backends.compiler").GPUTarget(*target)

    def get_current_target(self) -> object:
        """Return what is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream that a launch would take."""
        return 0


class _Pointer:
    """Stands for an aligned array."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def _main() -> None:
    del sys.path[0]  # the folder of this file, whose names are none of Triton's modules
    request = Request(*json.load(sys.stdin))
    importlib.import_module("triton.runtime.driver").driver.set_active(StandIn(request.target))
    arguments = *map(_Pointer, request.pointers), *request.numbers
    module_of(request.text).step.warmup(*arguments, grid=(1,), **request.options)
    _mark(request).touch()


if __name__ == "__main__":
    _main()
