"""Build of a C library by the system's compiler, in a separate process.

Libraries are cached in a folder, by the hash of their source. A library is native code, so it is loaded only
from a folder that no other user can write, and after a check of its digest (`trusted_files.py`). A library
that fails the check is deleted and built again.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import weakref

from halfstep.kernels import trusted_files

FOLDER = "HALFSTEP_KERNELS"
"""Environment variable for the folder with libraries. If it is empty, no library is cached."""

_FLAGS = (
    "-std=gnu11 -O3 -march=native -mprefer-vector-width=512 -ffp-contract=off -fno-math-errno "
    "-fno-trapping-math -fwrapv -fno-strict-aliasing -fno-tree-pre -fno-thread-jumps -shared -fPIC"
).split()
# Options that clang does not have.
_GCC_ONLY = ("-fno-tree-pre", "-fno-thread-jumps")


@functools.cache
def find_cc() -> str | None:
    """Return the C compiler in CC, or else gcc, cc or clang, or None if none is installed."""
    named = os.environ.get("CC")
    return next(filter(shutil.which, [named] if named else ["gcc", "cc", "clang"]), None)


@functools.cache
def flags() -> tuple[str, ...]:
    """Return the compiler's options. Options that the user sets for other programs are ignored."""
    said = subprocess.run(
        [find_cc() or "cc", "--version"], capture_output=True, text=True, check=False
    ).stdout
    return tuple(flag for flag in _FLAGS if "clang" not in said or flag not in _GCC_ONLY)


def folder() -> pathlib.Path | None:
    """Return the folder with libraries, or None if they are not cached, or if other users can write there."""
    named = os.environ.get(FOLDER)
    if named == "" or not hasattr(os, "getuid"):
        return None
    try:
        path = pathlib.Path(named or f"{tempfile.gettempdir()}/halfstep_kernels_{os.getuid()}").expanduser()
        path.mkdir(mode=0o755 if named else 0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no folder for temporary files, or no home
        return None
    return path if trusted_files.is_trusted_folder(path) else None


class Library:
    """A library from one source, which the compiler may still be building.

    Attributes:
        problem: the reason why there is no library, or "" if it is built or being built.
    """

    def __init__(self, source: str, options: tuple[str, ...] = ()) -> None:
        """Find the library, or start the compiler with the given options."""
        self.problem = ""
        name = hashlib.sha256("\0".join([source, *flags(), *options, _processor()]).encode()).hexdigest()[:32]
        kept = folder()
        self._path = kept / f"{name}.so" if kept else None
        self._loaded: ctypes.CDLL | None = None
        self._compiler: subprocess.Popen | None = None
        if self._path is not None and trusted_files.read(self._path) is not None:
            self._load(self._path)
        else:
            self._start(source, options)

    def _load(self, path: pathlib.Path) -> None:
        try:
            self._loaded = ctypes.CDLL(str(path))
        except OSError as error:
            self.problem = f"the library cannot be loaded ({error})"

    def _start(self, source: str, options: tuple[str, ...]) -> None:
        try:
            self._work = pathlib.Path(tempfile.mkdtemp(prefix="halfstep_"))
            (self._work / "kernel.c").write_text(source)
            command = [find_cc() or "cc", *flags(), "kernel.c", *options, "-o", "kernel.so"]
            with (self._work / "errors").open("wb") as errors:
                # A session of its own: an interrupt of the training does not reach the compiler.
                self._compiler = subprocess.Popen(
                    command, stderr=errors, stdin=subprocess.DEVNULL, cwd=self._work, start_new_session=True
                )
        except OSError as error:
            self.problem = f"the compiler cannot be started ({error})"
            return
        self._end = weakref.finalize(self, _clean_up, self._compiler, self._work, os.getpid())

    def get(self, *, wait: bool) -> ctypes.CDLL | None:
        """Return the library if it is built. With `wait`, wait for the compiler."""
        if self._compiler is None or (not wait and self._compiler.poll() is None):
            return self._loaded
        failed, made = self._compiler.wait(), self._work / "kernel.so"
        self._compiler = None
        if failed:
            errors = (self._work / "errors").read_text(errors="replace").strip()
            self.problem = f"{find_cc()} ended with {failed}: {errors[-300:]}"
        else:
            self._load(self._kept(made))
        self._end()
        return self._loaded

    def note(self, name: str) -> None:
        """Write a note about the library for later processes."""
        if (noted := self._noted(name)) is not None:
            with contextlib.suppress(OSError):  # a full or read-only folder
                trusted_files.write(*noted)

    def has_note(self, name: str) -> bool:
        """Whether a process has written this note about the library, and it has not been built again."""
        noted = self._noted(name)
        return noted is not None and trusted_files.read(noted[0]) == noted[1]

    def _noted(self, name: str) -> tuple[pathlib.Path, bytes] | None:
        """Return a note's file and its content, the library's digest, or None if no library is cached."""
        content = trusted_files.read(self._path) if self._path else None
        if self._path is None or content is None:
            return None
        return self._path.with_name(f"{self._path.stem}.{name}"), hashlib.sha256(content).digest()

    def _kept(self, made: pathlib.Path) -> pathlib.Path:
        """Return the path of a new library, in the folder with libraries if possible."""
        if self._path is None:
            return made
        try:
            trusted_files.write(self._path, made.read_bytes())
        except OSError:  # a full or read-only folder
            return made
        return self._path


def _clean_up(compiler: subprocess.Popen, work: pathlib.Path, process: int) -> None:
    """Stop a compiler that is no longer needed, and remove its files. A loaded library stays loaded."""
    if os.getpid() != process:  # a fork, whose parent still waits
        return
    if compiler.poll() is None:
        compiler.kill()
        compiler.wait()
    shutil.rmtree(work, ignore_errors=True)


@functools.cache
def _processor() -> str:
    """Return the processor's features, on which the compiler's choice of instructions depends."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    features = (line for line in lines if line.startswith(("flags", "Features")))
    return f"{platform.machine()} {next(features, '')}"
