"""The libraries of kernels and of their handler: built, tried, and registered with XLA."""

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
from halfstep_jax.kernels.trial import has_same_bits

TARGET = "halfstep_step"
"""The name of the custom call."""


class Kernel:
    """The kernel of a program.

    Attributes:
        program: that it computes.
        memory: the arrays of a leaf, in its order.
        name: which programs of XLA have, in place of an address.
        problem: why there is no kernel, or "".
    """

    def __init__(self, program: Program) -> None:
        """Trace a program."""
        self.program, self.name, self.problem = program, "", ""
        self._source, self._library, self._is_registered = "", None, False
        try:
            self._graph: Graph = simplified(trace(program))
            self.memory = self._graph.memory
            self._source = c_source(self._graph)
        except NoGeneratedForm as error:
            self.problem = f"there is no generated form of {error}"
            return
        self.name = hashlib.sha256(self._source.encode()).hexdigest()[:32]

    def start(self) -> None:
        """Find the library, or start its compiler."""
        if self._library is None and not self.problem:
            self._library = Library(self._source)

    def is_ready(self) -> bool:
        """Whether XLA can call the kernel; waits for the compiler, and tries a new library."""
        self.start()
        if self._is_registered or self._library is None:
            return self._is_registered
        handler, library = _handler(), self._library.get(wait=True)
        if handler is None or library is None:
            self.problem = self._library.problem or "the handler of custom calls cannot be built"
        elif self._is_tried(library):
            step = ctypes.cast(library.step, ctypes.c_void_p)
            self._is_registered = handler.halfstep_register(self.name.encode(), step) == 0
        return self._is_registered

    def _is_tried(self, library: ctypes.CDLL) -> bool:
        """Whether the library has the bits of XLA; that is noted beside it for later processes."""
        assert self._library is not None
        tried_with = f"jax-{jax.__version__}"
        if self.problem or self._library.has_note(tried_with):
            return not self.problem
        try:
            if not has_same_bits(self.program, self._graph, library):
                self.problem = "its bits differ from those of XLA"
        except Exception as error:  # of a user's rule, which may raise anything
            self.problem = f"its trial raised {type(error).__name__}: {str(error)[:300]}"
        if not self.problem:
            self._library.note(tried_with)
        return not self.problem


@functools.cache
def kernel_of(program: Program) -> Kernel:
    """Return the kernel of a program."""
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
