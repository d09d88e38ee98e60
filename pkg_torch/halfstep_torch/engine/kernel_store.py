"""Kernels that an earlier process compiled for this processor, called without torch.compile.

Tracing a step and finding its kernel in Inductor's cache takes 3 seconds; loading the library that Inductor
made takes milliseconds. This module is the one place that knows what Inductor makes: a wrapper in Python that
calls one function in C++ with the memory of its arguments and a length. Anything else is not stored.

The name of a library says all that its bits depend on (`kernel_name`). Before it is used it steps memory of
ours beside eager mode, and is left out unless every bit is the same.
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import halfstep

_FOLDER = "HALFSTEP_KERNELS"
"""The environment variable that names the folder; empty for none."""

Place = tuple[int, int | None]
"""Which tensor of a call an argument is or, with an axis, of which it is the length."""


class _Foreign(Exception):
    """Something of another package, whose code may be another tomorrow."""


def folder() -> pathlib.Path | None:
    """Return where kernels are stored; None where they are not, as where others could write code."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    default = f"{tempfile.gettempdir()}/halfstep_kernels_{os.getuid()}"
    named = os.environ.get(_FOLDER, default)
    if not named:
        return None
    path = pathlib.Path(named)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError:
        return None
    return path if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def kernel_name(*what: Any) -> str | None:
    """Return the name of a kernel of such a stage, or None where it has parts of other packages than ours."""
    try:
        parts = [_written(x) for x in what]
    except _Foreign:
        return None
    text = json.dumps([torch.__version__, torch.version.git_version, _processor(), _source(), parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _written(x: Any) -> Any:
    """Return what a part of a stage is, in the same words in every process."""
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
    """Return what decides which instructions a compiler writes for this processor."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


@functools.cache
def _source() -> str:
    """Return a digest of our own code, which writes the stages."""
    digest = hashlib.sha256()
    for package in (pathlib.Path(halfstep.__file__).parent, pathlib.Path(__file__).parents[1]):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def store(name: str | None, made: Any, places: Sequence[Place]) -> None:
    """Store what Inductor made, if it is one function, called with arguments that stand at known places."""
    path = folder()
    found = _one_call(made) if name and path else None
    if found is None or path is None:
        return
    library, order = found
    arguments = [list(places[i]) for i in order]
    try:
        for suffix, write in (
            (".so", lambda to: shutil.copyfile(library, to)),
            (".json", lambda to: pathlib.Path(to).write_text(json.dumps(arguments))),
        ):
            handle, part = tempfile.mkstemp(dir=path)
            os.close(handle)
            write(part)
            pathlib.Path(part).replace(path / f"{name}{suffix}")
    except OSError:
        return


def _one_call(made: Any) -> tuple[str, list[int]] | None:
    """Return the library of the only function that a wrapper calls, and which input each argument is."""
    source = getattr(made, "source_code", "")
    body = re.search(r"def call\(self, args\):\n(.*?)\n        return \(\)", source, re.DOTALL)
    if body is None:
        return None
    lines = [line.strip() for line in body[1].splitlines()]
    calls = [re.fullmatch(r"(cpp_fused\w*)\((.*)\)", line) for line in lines]
    calls = [call for call in calls if call]
    plain = (
        r"(args\.clear\(\)|arg\w+(, arg\w+)* = args|s\d+ = arg\w+|del arg\w+|assert_size_stride\(.*\)|cpp_.*)"
    )
    if len(calls) != 1 or not all(re.fullmatch(plain, line) for line in lines):
        return None
    inputs = next(line for line in lines if line.endswith(" = args")).removesuffix(" = args").split(", ")
    lengths = dict(line.split(" = ") for line in lines if re.fullmatch(r"s\d+ = arg\w+", line))
    names = [lengths.get(name, name) for name in calls[0][2].split(", ")]
    function = made.current_callable.__func__.__globals__[calls[0][1]]
    return function.__self__.__file__, [inputs.index(name) for name in names]


def is_stored(name: str | None) -> bool:
    """Whether a kernel is there."""
    path = folder() if name else None
    return path is not None and (path / f"{name}.json").exists()


def forget(name: str | None) -> None:
    """Let a kernel be there no more."""
    path = folder() if name else None
    if path is not None:
        (path / f"{name}.json").unlink(missing_ok=True)


def load(name: str | None) -> Callable[..., None] | None:
    """Return a stored kernel as a function of the tensors of a call, or None where there is none."""
    path = folder()
    if path is None or not is_stored(name):
        return None
    try:
        arguments = json.loads((path / f"{name}.json").read_text())
        kernel = ctypes.CDLL(str(path / f"{name}.so")).kernel
    except (OSError, ValueError, AttributeError):
        return None
    kernel.restype = None
    kernel.argtypes = [ctypes.c_void_p if axis is None else ctypes.c_int64 for _, axis in arguments]

    def call(*tensors: Tensor) -> None:
        kernel(*[tensors[i].data_ptr() if axis is None else tensors[i].shape[axis] for i, axis in arguments])

    return call
