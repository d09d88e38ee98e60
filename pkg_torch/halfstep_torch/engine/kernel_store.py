"""Kernels that an earlier process compiled for this processor: stored, checked, called without torch.compile.

Tracing a step and finding its kernel in Inductor's cache takes 3 seconds; loading the library that Inductor
made takes milliseconds. This module is the one place that knows what Inductor makes: a wrapper in Python that
calls functions in C++ with the memory of its arguments, of temporaries, and a length. A wrapper that does
anything else is not stored.

The name of a library says all that its bits depend on (`kernel_name`). Before it is used it steps memory of
ours beside eager mode, and is left out unless every bit is the same.
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import halfstep
from halfstep_torch.engine import trusted_files

_FOLDER = "HALFSTEP_KERNELS"
"""The environment variable that names the folder; empty for none."""

Place = tuple[int, int | None]
"""Which tensor of a call an argument is or, with an axis, of which it is the length.

Temporaries count from the end, -1 the first: how many tensors a call has, its arguments do not say.
"""


_SAME_MEMORY = (
    r"(.*); del \w+  # reuse",
    r"torch\.ops\.aten\.view\.dtype\((.*), torch\.\w+\)",
    r"reinterpret_tensor\((\w+), .*, 0\)",
    r"(\w+)\.size\(\)",
)
"""How a wrapper gives memory a second name, one form within the other."""


class _Foreign(Exception):
    """An object of another package, whose code may change, or a processor that is not known."""


def folder() -> pathlib.Path | None:
    """Return the folder of stored kernels; None if they are not stored, as where others can write."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    named = os.environ.get(_FOLDER)
    if named == "":
        return None
    try:
        path = pathlib.Path(named or f"{tempfile.gettempdir()}/halfstep_kernels_{os.getuid()}").expanduser()
        path.mkdir(mode=0o755 if named else 0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no folder for temporary files, or no home
        return None
    return path if trusted_files.is_trusted_folder(path) else None


def kernel_name(*what: object) -> str | None:
    """Return the name of a stage's kernel; None for parts of another package, or an unknown processor."""
    try:
        parts = [_processor(), _source(), [_written(x) for x in what]]
    except _Foreign:
        return None
    text = json.dumps([torch.__version__, torch.version.git_version, *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _written(x: object) -> str | list:
    """Return a description of a part of a stage, equal in every process."""
    if isinstance(x, (bool, int, float, str, type(None))):
        return repr(x)
    if isinstance(x, (torch.dtype, torch.device)):
        return str(x)
    if isinstance(x, (tuple, list)):
        return [*getattr(x, "_fields", ()), *map(_written, x)]
    kind = x if callable(x) and hasattr(x, "__qualname__") else type(x)
    if kind.__module__.partition(".")[0] not in ("halfstep", "halfstep_torch"):
        raise _Foreign
    fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) and kind is not x else ()
    return [kind.__module__, kind.__qualname__, *([f.name, _written(getattr(x, f.name))] for f in fields)]


@functools.cache
def _processor() -> str:
    """Return what the compiler's choice of instructions depends on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise _Foreign from None
    return next((line for line in lines if line.startswith("flags")), "")


@functools.cache
def _source() -> str:
    """Return a digest of our own code, which writes the stages."""
    digest = hashlib.sha256()
    for package in (pathlib.Path(halfstep.__file__).parent, pathlib.Path(__file__).parents[1]):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def store(name: str | None, made: Callable, places: Sequence[Place]) -> None:
    """Store a kernel of Inductor if every line of its wrapper is known."""
    path = folder() if name else None
    if path is None:
        return
    try:
        wrapper = _Wrapper(made, places)
    except (_Foreign, AttributeError, KeyError, ValueError):  # another torch may write something else
        return
    kept = {"temporaries": wrapper.temporaries, "calls": [places for _, places in wrapper.calls]}
    try:
        for i, (library, _) in enumerate(wrapper.calls):
            trusted_files.write(path / f"{name}.{i}.so", pathlib.Path(library).read_bytes())
        trusted_files.write(path / f"{name}.json", json.dumps(kept).encode())
    except OSError:
        return


class _Wrapper:
    """What Inductor's wrapper does: `temporaries`, each (place of a length, bytes a unit of it), and `calls`.

    A call is (library, places of its arguments). Lines that this does not know raise _Foreign.
    """

    def __init__(self, made: Callable, places: Sequence[Place]) -> None:
        self.temporaries: list[tuple[Place, int]] = []
        self.calls: list[tuple[str, list[Place]]] = []
        self._known: dict[str, Place] = {}
        source = getattr(made, "source_code", "")
        body = re.search(r"def call\(self, args\):\n(.*?)\n        return \(\)", source, re.DOTALL)
        if body is None:
            raise _Foreign
        functions = made.current_callable.__func__.__globals__
        for line in map(str.strip, body[1].splitlines()):
            if inputs := re.fullmatch(r"(arg\w+(?:, arg\w+)*) = args", line):
                self._known = dict(zip(inputs[1].split(", "), places, strict=True))
            elif call := re.fullmatch(r"(cpp_fused\w*)\((.*)\)", line):
                arguments = [self._place(name) for name in call[2].split(", ")]
                self.calls.append((functions[call[1]].__self__.__file__, arguments))
            elif not re.fullmatch(r"args\.clear\(\)|del \w+|assert_\w+\(.*\)|#.*", line):
                self._read_name(line)

    def _place(self, name: str) -> Place:
        if name not in self._known:
            raise _Foreign
        return self._known[name]

    def _read_name(self, line: str) -> None:
        """Read a line that names a length, a temporary, or memory that already has a name."""
        name, _, what = line.partition(" = ")
        for same in _SAME_MEMORY:
            if found := re.fullmatch(same, what):
                what = found[1]
        if length := re.fullmatch(r"(\w+)_size\[(\d+)\]", what):
            self._known[name] = self._place(length[1])[0], int(length[2])
        elif temporary := re.fullmatch(r"empty_strided_cpu\(\((.*?)\), \(.*?\), torch\.(\w+)\)", what):
            factors = re.findall(r"\w+", temporary[1])
            (length,) = (factor for factor in factors if not factor.isdigit())
            row = math.prod(int(factor) for factor in factors if factor.isdigit())
            self.temporaries.append((self._place(length), row * getattr(torch, temporary[2]).itemsize))
            self._known[name] = -len(self.temporaries), None
        else:
            self._known[name] = self._place(what)


def is_stored(name: str | None) -> bool:
    """Whether a kernel is stored."""
    path = folder() if name else None
    return path is not None and (path / f"{name}.json").exists()


def checked(
    name: str | None, has_same_bits: Callable[[Callable[..., None]], bool]
) -> Callable[..., None] | None:
    """Return a stored kernel after it gave eager's bits on scratch memory; forget it otherwise."""
    kernel = load(name)
    if kernel is None:
        return None
    try:
        if has_same_bits(kernel):
            return kernel
    except Exception:  # of what was stored: eager mode would raise the same, and is tried next
        pass
    _forget(name)
    return None


def _forget(name: str | None) -> None:
    """Remove a kernel, which is then compiled anew."""
    if (path := folder()) is not None:
        trusted_files.remove(path / f"{name}.json")


def load(name: str | None) -> Callable[..., None] | None:
    """Return a stored kernel as a function of a call's tensors, or None."""
    path = folder()
    if path is None or not is_stored(name):
        return None
    try:
        kept = json.loads(trusted_files.read(path / f"{name}.json") or "")
        libraries = [path / f"{name}.{i}.so" for i in range(len(kept["calls"]))]
        if None in map(trusted_files.read, libraries):
            raise ValueError
        kernels = [ctypes.CDLL(str(library)).kernel for library in libraries]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        _forget(name)
        return None
    for kernel, places in zip(kernels, kept["calls"], strict=True):
        kernel.restype = None
        kernel.argtypes = [ctypes.c_void_p if axis is None else ctypes.c_int64 for _, axis in places]

    def call(*tensors: Tensor) -> None:
        sizes = [size * tensors[i].shape[axis] for (i, axis), size in reversed(kept["temporaries"])]
        memory = [*tensors, *(torch.empty(size, dtype=torch.uint8) for size in sizes)]
        for kernel, places in zip(kernels, kept["calls"], strict=True):
            kernel(*[memory[i].data_ptr() if axis is None else memory[i].shape[axis] for i, axis in places])

    return call
