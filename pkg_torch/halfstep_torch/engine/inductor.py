"""Inductor, which compiles a step: its options, the message while it compiles, and direct calls.

A call of a function of torch.compile passes Dynamo, which asks at each whether everything that it saw still
is as it was: of a step, some hundred attributes of its stage, which never change. That takes as long as
stepping 20,000 elements. `Inductor.direct` calls what was made, with the arguments that Dynamo would pass.
"""

import contextlib
import functools
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Seconds of a compilation after which it is said what is waited for.
_PATIENCE = 2.0
# Each is asked for: the first is not documented by GCC, the second is new in GCC 12.
_QUICKER = ("-mtune-ctrl=^inter_unit_moves_to_vec", "-mmove-max=256")
_LOG = logging.getLogger("halfstep_torch")
# Options that decide bits, which a user may have set otherwise for other code.
_EXACT_ON_CPU = {
    "cpu_backend": "cpp",
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
# Else Triton fuses products with sums, divides approximately and flushes subnormal numbers, which eager torch
# does not.
_EXACT_ON_GPU = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
_ALSO_ON_GPU = {"cuda_backend": "triton", "triton.codegen_upcast_to_fp32": True, "use_fast_math": False}


def find_cxx() -> str | None:
    """Return the C++ compiler that Inductor will use on CPU, or None if there is none."""
    default = "clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++"
    cxx = os.environ.get("CXX", default)
    return cxx if shutil.which(cxx) else None


def missing_options(device: torch.device) -> list[str]:
    """Return the Inductor options that the contract's bits need and this torch lacks."""
    needed = _EXACT_ON_GPU if device.type != "cpu" else {}
    if not needed:
        return []
    from torch._inductor import config

    return [name for name in needed if not _has(config, name)]


class Inductor:
    """A backend of torch.compile: Inductor, which records the arguments of Dynamo's calls."""

    def __init__(self, compile_fx: Callable, options: dict) -> None:
        self._compile_fx, self._options, self._made = compile_fx, options, []
        self._seen: list[tuple] | None = []
        self.made: Any = None  # Inductor's, as are graphs: see `kernel_store`
        self.places: list[tuple[int, int | None]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence) -> Callable:
        """Compile a graph."""
        made = self._compile_fx(graph, inputs, config_patches=self._options)
        self._made.append(made)

        def call(*arguments: Tensor | int) -> object:
            if self._seen is not None:
                self._seen.append(arguments)
            return made(*arguments)

        return call

    def direct(self, calls: Sequence[Sequence[Tensor]]) -> Callable[..., None] | None:
        """Return what Inductor made, as a function of the tensors that Dynamo was given.

        `calls` are the tensors of each call that was made through Dynamo, of different lengths. None where it
        is not known which argument is which, or where nothing was compiled, or more than once.
        """
        seen, self._seen = self._seen, None
        if len(self._made) != 1 or seen is None or len(seen) != len(calls):
            return None
        places = []
        for arguments in zip(*seen, strict=True):
            known = [_places(x, tensors) for x, tensors in zip(arguments, calls, strict=True)]
            common = [place for place in known[0] if all(place in other for other in known)]
            if not common:
                return None
            places.append(common[0])
        (made,) = self._made
        self.made, self.places = made, places

        def call(*tensors: Tensor) -> None:
            made(*[tensors[i] if axis is None else tensors[i].shape[axis] for i, axis in places])

        return call


def compile_rows(
    function: Callable[..., None],
    options: dict,
    calls: Sequence[Sequence[Tensor]],
    keep: Callable[[Callable, list[tuple[int, int | None]]], None],
) -> Callable[..., None]:
    """Return a compiled function of tensors of any length, given calls with tensors of different lengths.

    `keep` gets what Inductor made, and which tensor, or length of one, each of its arguments is.
    """
    with compiling():
        backend = _backend(options)
        chosen: dict = {"options": options} if backend is None else {"backend": backend}
        kernel = torch.compile(own_code(function), dynamic=True, fullgraph=True, **chosen)
        for tensors in calls:  # the second time by what the first has compiled
            kernel(*tensors)
    direct = backend and backend.direct(calls)
    if backend is None or direct is None:
        return kernel
    keep(backend.made, backend.places)
    return direct


def _backend(options: dict) -> Inductor | None:
    """Return Inductor as a backend; None if this torch has moved it, and calls go through Dynamo."""
    try:
        from torch._inductor.compile_fx import compile_fx
    except ImportError:
        return None
    return Inductor(compile_fx, options)


def _places(argument: Tensor | int, tensors: Sequence[Tensor]) -> list[tuple[int, int | None]]:
    """Return which tensor an argument is, or which tensor's length along which axis."""
    if isinstance(argument, Tensor):
        return [(i, None) for i, x in enumerate(tensors) if x is argument]
    return [(i, axis) for i, x in enumerate(tensors) for axis, n in enumerate(x.shape) if n == argument]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile what is called inside; log once in a process that it waits for a compilation."""
    timer = threading.Timer(_PATIENCE, _say)
    timer.daemon = True
    timer.start()
    try:
        with warnings.catch_warnings():
            # Inductor's modules warn, as they are imported, of what torch itself has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Inductor says that it runs such a kernel more slowly.
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed", UserWarning)
            # Without a CUDA toolkit it says that powers may have other bits; only L4 has one, of any bits.
            warnings.filterwarnings("ignore", ".*using Triton's bundled libdevice", UserWarning)
            # Lengths are dynamic; what a stage says (bits of mantissa, units, elements of a block) is fixed.
            with _specialized():
                yield
    finally:
        timer.cancel()


def _specialized() -> contextlib.AbstractContextManager:
    """Return Dynamo's setting for specialized integers; without it compiling takes longer or fails."""
    try:
        return torch._dynamo.config.patch(specialize_int=True, specialize_float=True)
    except AttributeError:
        return contextlib.nullcontext()


def mark_width(x: Tensor) -> None:
    """Tell Dynamo that rows of this matrix always have this width, which then is a constant of the kernel."""
    mark_static = getattr(torch._dynamo, "mark_static", None)
    if mark_static is not None:
        mark_static(x, 1)


@functools.cache
def _say() -> None:
    _LOG.warning(
        "torch.compile is compiling the optimizer step: some seconds for each kernel, the first time on this "
        "machine. compile=False steps without it, more slowly, with the same bits."
    )


def own_code(function: Callable) -> Callable:
    """Return a copy of a function, code included."""
    # Dynamo keeps its graphs, and limits their number, per code object; every plan needs its own.
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def compile_options(device: torch.device, of_integers: bool = False) -> dict:
    """Return options of Inductor for one function; the global configuration is left alone.

    Args:
        device: where it runs.
        of_integers: whether it computes with integers alone. Inductor's vectors check the length of each
            shift; g++ has vectors of its own for a plain loop, which takes two thirds of the time.
    """
    from torch._inductor import config

    exact = _EXACT_ON_CPU if device.type == "cpu" else {**_EXACT_ON_GPU, **_ALSO_ON_GPU}
    options: dict[str, object] = {name: value for name, value in exact.items() if _has(config, name)}
    if device.type != "cpu":
        return options
    # Past this many operations, 50 on a CPU, Inductor gives a value a separate loop body. Random words of
    # three roles then cut a bf16 step into bodies of float32 and int32. Inductor vectorises these by half as
    # many elements at a time. At 60 the default step takes two thirds of the time; at 200 compiling takes
    # minutes.
    if _has(config, "realize_opcount_threshold"):
        options["realize_opcount_threshold"] = 60
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return options
    if not hasattr(config.cpp, "march") or config.cpp.march is not None or "clang" in (find_cxx() or ""):
        return options
    # Inductor passes -fno-tree-loop-vectorize to g++. That leaves its bit casts (float32 to int32 and back)
    # as scalar loops, and makes this kernel more than twice as slow. This is the only option that can carry
    # the flag that undoes it; it changes no bit.
    if of_integers and _has(config, "cpp.simdlen"):
        options["cpp.simdlen"] = 1
    # A step has more constants than there are registers; g++ makes the others anew in every turn, by two
    # instructions each, unless it is told to read them from memory, which takes none. And without AVX-512
    # Inductor's vectors of integers pass through memory: g++ writes their halves, and the processor waits for
    # these before it reads the whole. Moved whole, without waiting, a step takes half of the time.
    flags = ["native", "-ftree-loop-vectorize", *filter(_accepted, _QUICKER)]
    return options | {"cpp.march": " ".join(flags)}


@functools.cache
def _accepted(flag: str) -> bool:
    """Return whether the C++ compiler knows a flag."""
    cxx = find_cxx()
    command = [flag, "-march=native", "-fsyntax-only", "-x", "c++", "/dev/null"]
    return cxx is not None and not subprocess.run([cxx, *command], capture_output=True).returncode


def _has(config: types.ModuleType, name: str) -> bool:
    return hasattr(config, name)  # dots included
