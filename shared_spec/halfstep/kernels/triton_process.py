"""Compilation of Triton kernels in separate processes, which store them in Triton's cache.

Launches compile kernels one after another. Processes compile several kernels at once and use no device
memory, because they need only the kind of device. Launches then find the kernels in the cache. Each process
runs this file as its program, so the file does not import this package.
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
    """A kernel and its launch arguments, on which the compiled code depends.

    Attributes:
        text: text of a module with the function `step`.
        target: arguments for Triton's `GPUTarget`.
        pointers: dtypes of the first arguments, which are aligned to 16 bytes.
        numbers: the integers that follow.
        options: the kernel's constants, and the compiler's options.
    """

    text: str
    target: tuple[str, int | str, int]
    pointers: Sequence[str]
    numbers: Sequence[int]
    options: dict[str, int | str | bool | None]


def compile_at_once(requests: Iterable[Request | None]) -> None:
    """Compile kernels that are not in the cache, if there are several, and wait until they are stored.

    If a process fails, the launch compiles its kernel and raises the error.
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
            running.callback(process.kill)  # an interrupt leaves it running, and a finished one ignores this
            processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(OSError), process.stdin:  # raised if the process has ended
                process.stdin.write(json.dumps(request).encode())
        for process in processes:
            process.wait()


def _mark(request: Request) -> pathlib.Path:
    """Return the marker file for a kernel that is stored in Triton's cache."""
    triton = importlib.import_module("triton")
    said = json.dumps([triton.__version__, request], sort_keys=True)
    return pathlib.Path(triton.knobs.cache.dir, f"halfstep_{hashlib.sha256(said.encode()).hexdigest()}")


@functools.cache
def module_of(text: str) -> ModuleType:
    """Return the module for a source. No file is written, because Triton reads from `linecache`."""
    name = f"<halfstep kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = type(importlib)(name)
    module.__file__ = name
    run: Callable = exec
    run(compile(text, name, "exec"), module.__dict__)
    return module


class StandIn:
    """Replacement for a device driver, with which Triton can compile kernels but not launch them."""

    def __init__(self, target: Sequence[int | str]) -> None:
        self._target = importlib.import_module("triton.backends.compiler").GPUTarget(*target)

    def get_current_target(self) -> object:
        """Return the target of compilation."""
        return self._target

    def get_current_device(self) -> int:
        """Return the index 0 for the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream for a launch."""
        return 0


class _Pointer:
    """Replacement for an aligned array."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def _main() -> None:
    del sys.path[0]  # this file's folder, so that its files do not hide Triton's modules
    request = Request(*json.load(sys.stdin))
    importlib.import_module("triton.runtime.driver").driver.set_active(StandIn(request.target))
    arguments = *map(_Pointer, request.pointers), *request.numbers
    module_of(request.text).step.warmup(*arguments, grid=(1,), **request.options)
    _mark(request).touch()


if __name__ == "__main__":
    _main()
