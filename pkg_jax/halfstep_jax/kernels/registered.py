"""The kernel of a program: for a CPU a C library that is registered with XLA, for a GPU one in Pallas."""

import ctypes
import functools
import hashlib
import importlib

import jax
import numpy as np

from halfstep.kernels.build import Library, find_cc
from halfstep.kernels.c_source import c_source
from halfstep.kernels.graph import Graph, NoGeneratedForm
from halfstep.kernels.simplify import simplified
from halfstep_jax.kernels.handler import HANDLER
from halfstep_jax.kernels.pallas_form import missing_form, step_leaf
from halfstep_jax.kernels.program import Program
from halfstep_jax.kernels.trace import trace
from halfstep_jax.kernels.trial import Step, has_same_bits, step_by_library

TARGET = "halfstep_step"
"""The name of the custom call."""


class Kernel:
    """The kernel of a program.

    Attributes:
        program: that it computes.
        graph: of the program; None if there is none.
        c_form, pallas_form: of the kernel.
    """

    def __init__(self, program: Program) -> None:
        """Trace a program."""
        self.program, problem = program, ""
        self.graph: Graph | None = None
        try:
            self.graph = simplified(trace(program))
        except NoGeneratedForm as error:
            problem = f"there is no generated form of {error}"
        self.c_form = CForm(program, self.graph, problem)
        self.pallas_form = PallasForm(program, self.graph, problem)

    @property
    def here(self) -> "CForm | PallasForm":
        """The form for the default device."""
        return self.c_form if jax.default_backend() == "cpu" else self.pallas_form


class CForm:
    """The kernel in C.

    Attributes:
        name: which programs of XLA have, in place of an address.
        problem: why there is no kernel, or "".
    """

    def __init__(self, program: Program, graph: Graph | None, problem: str) -> None:
        self.name, self.problem = "", problem
        self._program, self._graph = program, graph
        self._source, self._library, self._is_registered = "", None, False
        if graph is not None:
            try:
                self._source = c_source(graph)
            except NoGeneratedForm as error:
                self.problem = f"there is no generated form of {error}"
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
        assert self._graph is not None
        tried_with = f"jax-{jax.__version__}"
        if not self.problem and not self._library.has_note(tried_with):
            self.problem = problem_of_trial(self._program, self._graph, step_by_library(library))
            if not self.problem:
                self._library.note(tried_with)
        return not self.problem


class PallasForm:
    """The kernel in Pallas.

    Attributes:
        problem: why there is no kernel, or "".
    """

    def __init__(self, program: Program, graph: Graph | None, problem: str) -> None:
        missing = missing_form(graph) if graph is not None else ""
        self.problem = problem or (f"Pallas has no form of {missing}" if missing else "")
        self._program, self._graph, self._is_tried = program, graph, False

    def start(self) -> None:
        """Do nothing: there is no compiler of its own."""

    def is_ready(self) -> bool:
        """Whether XLA can compile the kernel; on a GPU that is here it is tried first."""
        if not self.problem and not self._is_tried and self._graph is not None:
            try:
                device = jax.devices("cuda")[0]
            except RuntimeError:  # compiled ahead of time, without a device
                return True
            with jax.default_device(device):
                step = step_by_pallas(self._program, self._graph)
                self.problem = problem_of_trial(self._program, self._graph, step)
            self._is_tried = True
        return not self.problem


def step_by_pallas(program: Program, graph: Graph, **options: bool) -> Step:
    """Return the step of a trial by Pallas, with options of `step_leaf`."""

    def step(arrays: dict[str, np.ndarray], keys: np.ndarray, numbers: np.ndarray) -> None:
        flat = [arrays[row.name].reshape(-1).copy() for row in program.arrays]
        run = jax.jit(functools.partial(step_leaf, program, graph, flat[0].size, **options))
        made = run(np.zeros(1, np.uint32), keys, numbers, flat)
        for (_, _, row), x in zip(program.results, made, strict=True):
            arrays[row.name][...] = np.asarray(x).reshape(arrays[row.name].shape)

    return step


def problem_of_trial(program: Program, graph: Graph, step: Step) -> str:
    """Return why a kernel cannot be used, or "" if it has the bits of XLA."""
    try:
        return "" if has_same_bits(program, graph, step) else "its bits differ from those of XLA"
    except Exception as error:  # of a user's rule or a compiler, which may raise anything
        return f"its trial raised {type(error).__name__}: {str(error)[:300]}"


@functools.cache
def kernel_of(program: Program) -> Kernel:
    """Return the kernel of a program."""
    return Kernel(program)


def unavailable() -> str:
    """Return why the default device and this version of JAX have no kernels, or ""."""
    return _unavailable(jax.default_backend())


@functools.cache
def _unavailable(backend: str) -> str:
    if backend == "gpu":
        return _without_pallas()
    if backend != "cpu":
        return f"the device is a {backend}"
    if not hasattr(jax, "ffi"):
        return "this version of JAX has no jax.ffi"
    return "" if find_cc() else "there is no C compiler"


def _without_pallas() -> str:
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
        version = importlib.import_module("jax.extend.backend").get_backend().platform_version
    except (ImportError, AttributeError):
        return "this version of JAX has no such Pallas"
    if not all(hasattr(triton, name) for name in ("load", "store", "CompilerParams")):
        return "this version of JAX has no such Pallas"
    return "" if "cuda" in version.lower() else "the GPU is not NVIDIA's"


@functools.cache
def _handler() -> ctypes.CDLL | None:
    """Return the library of the handler, registered with XLA."""
    library = Library(HANDLER, (f"-I{jax.ffi.include_dir()}", "-lm", "-lpthread")).get(wait=True)
    if library is None:
        return None
    library.halfstep_register.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.halfstep_step), platform="cpu")
    return library
