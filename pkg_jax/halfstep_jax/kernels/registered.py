"""The libraries of kernels and of their handler, built and registered with XLA."""

import ctypes
import functools
import hashlib

import jax

from halfstep.kernels.build import Library, find_cc
from halfstep.kernels.c_source import c_source
from halfstep.kernels.graph import Graph, NoGeneratedForm
from halfstep.kernels.simplify import simplified
from halfstep_jax.kernels.handler import HANDLER
from halfstep_jax.kernels.program import Program
from halfstep_jax.kernels.trace import trace

TARGET = "halfstep_step"
"""The name of the custom call."""


class Kernel:
    """The kernel of a program.

    Attributes:
        program: that it computes.
        name: which programs of XLA have, in place of an address.
        problem: why there is no kernel, or "".
    """

    def __init__(self, program: Program) -> None:
        """Trace a program and start the compiler."""
        self.program, self.name, self.problem, self._library = program, "", "", None
        self._is_registered = False
        try:
            self.graph: Graph = simplified(trace(program))
            source = c_source(self.graph)
        except NoGeneratedForm as error:
            self.problem = f"there is no generated form of {error}"
            return
        self.name = hashlib.sha256(source.encode()).hexdigest()[:32]
        self._library = Library(source)

    def is_ready(self) -> bool:
        """Whether XLA can call the kernel; waits for the compiler."""
        if self._is_registered or self._library is None:
            return self._is_registered
        handler, library = _handler(), self._library.get(wait=True)
        if handler is None or library is None:
            self.problem = self._library.problem or "the handler of custom calls cannot be built"
            return False
        step = ctypes.cast(library.step, ctypes.c_void_p)
        self._is_registered = handler.halfstep_register(self.name.encode(), step) == 0
        return self._is_registered


@functools.cache
def kernel_of(program: Program) -> Kernel:
    """Return the kernel of a program. If it is new, its compiler is started."""
    return Kernel(program)


@functools.cache
def unavailable() -> str:
    """Return why this machine and this version of JAX have no kernels, or ""."""
    if not hasattr(jax, "ffi"):
        return "this version of JAX has no jax.ffi"
    if find_cc() is None:
        return "there is no C compiler"
    return ""


@functools.cache
def _handler() -> ctypes.CDLL | None:
    """Return the library of the handler, registered with XLA."""
    library = Library(HANDLER, (f"-I{jax.ffi.include_dir()}", "-lm", "-lpthread")).get(wait=True)
    if library is None:
        return None
    library.halfstep_register.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.halfstep_step), platform="cpu")
    return library
