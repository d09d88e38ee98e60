"""Inductor, which compiles a step: its options, what is said meanwhile, and calls of what it made.

A call of a function of torch.compile passes Dynamo, which asks at each whether everything that it saw still
is as it was: of a step, some hundred attributes of its stage, which never change. That takes as long as
stepping 20,000 elements. `Inductor.direct` calls what was made, with the arguments that Dynamo would pass.
"""

import contextlib
import functools
import logging
import platform
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.engine.compile_choice import find_cxx

# Seconds of a compilation after which it is said what is waited for.
_PATIENCE = 2.0
# Not documented by GCC, so it is asked for.
_FROM_MEMORY = "-mtune-ctrl=^inter_unit_moves_to_vec"
_LOG = logging.getLogger("halfstep_torch")


class Inductor:
    """A backend of torch.compile: Inductor, that sees by which arguments Dynamo calls what it made."""

    def __init__(self, options: dict) -> None:
        self._options, self._made = options, []
        self._seen: list[tuple] | None = []

    def __call__(self, graph: Any, inputs: Sequence) -> Callable:
        """Compile a graph."""
        from torch._inductor.compile_fx import compile_fx

        made: Any = compile_fx(graph, inputs, config_patches=self._options)
        self._made.append(made)

        def call(*arguments: Any) -> Any:
            if self._seen is not None:
                self._seen.append(arguments)
            return made(*arguments)

        return call

    def direct(self, calls: Sequence[Sequence[Tensor]]) -> Callable[..., None] | None:
        """Return what Inductor made, as a function of the tensors that Dynamo was given.

        None where it is not known which argument is which, or where nothing was compiled, or more than once.

        Args:
            calls: the tensors of each call that was made through Dynamo, of different lengths.
        """
        seen, self._seen = self._seen, None
        if len(self._made) != 1 or seen is None or len(seen) != len(calls):
            return None
        places = []
        for of_calls in zip(*seen, strict=True):
            known = [_places(x, tensors) for x, tensors in zip(of_calls, calls, strict=True)]
            common = [place for place in known[0] if all(place in other for other in known)]
            if not common:
                return None
            places.append(common[0])
        (made,) = self._made

        def call(*tensors: Tensor) -> None:
            made(*[tensors[i] if axis is None else tensors[i].shape[axis] for i, axis in places])

        return call


def _places(argument: Any, tensors: Sequence[Tensor]) -> list[tuple[int, int | None]]:
    """Return which of the tensors an argument is, or of which it is the length, along which axis."""
    if isinstance(argument, Tensor):
        return [(i, None) for i, x in enumerate(tensors) if x is argument]
    return [(i, axis) for i, x in enumerate(tensors) for axis, n in enumerate(x.shape) if n == argument]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile what is called inside, and say once in a process what it waits for, if it waits."""
    timer = threading.Timer(_PATIENCE, _say)
    timer.daemon = True
    timer.start()
    try:
        with warnings.catch_warnings():
            # Inductor's modules warn, as they are imported, of what torch itself has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Inductor says that it runs such a kernel more slowly.
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed", UserWarning)
            # Lengths are dynamic; what a stage says (bits of mantissa, units, elements of a block) is fixed.
            with torch._dynamo.config.patch(specialize_int=True, specialize_float=True):
                yield
    finally:
        timer.cancel()


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


def compile_options(device: torch.device) -> dict:
    """Return options of Inductor for one function; the global configuration is left alone."""
    from torch._inductor import config

    if device.type != "cpu":
        # Else Triton fuses products with sums, divides approximately and flushes subnormal numbers, which
        # eager torch does not.
        numerics = ("eager_numerics.division_rounding", "eager_numerics.disable_ftz")
        wanted = ("emulate_precision_casts", *numerics)
        return {name: True for name in wanted if _has(config, name)}
    # Past that many operations Inductor gives a value a loop body of its own, of 50 on a CPU: random words of
    # three roles then cut a bf16 step into bodies of float32 and int32, which it vectorises by half as many
    # elements at a time. At 60 the default step takes two thirds of the time; at 200 compiling takes minutes.
    options: dict = {"realize_opcount_threshold": 60} if _has(config, "realize_opcount_threshold") else {}
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return options
    if not hasattr(config.cpp, "march") or config.cpp.march is not None or "clang" in (find_cxx() or ""):
        return options
    # Inductor passes -fno-tree-loop-vectorize to g++, which leaves its bit casts (float32 to int32 and back)
    # as scalar loops and makes this kernel more than twice as slow. This is the one option that can carry the
    # flag that undoes it; it changes no bit.
    march = "native -ftree-loop-vectorize"
    # A step has more constants than there are registers; g++ makes the others anew in every turn, by two
    # instructions each, unless it is told to read them from memory, which takes none.
    return options | {"cpp.march": f"{march} {_FROM_MEMORY}" if _accepted(_FROM_MEMORY) else march}


@functools.cache
def _accepted(flag: str) -> bool:
    """Return whether the C++ compiler knows a flag."""
    cxx = find_cxx()
    command = [flag, "-march=native", "-fsyntax-only", "-x", "c++", "/dev/null"]
    return cxx is not None and not subprocess.run([cxx, *command], capture_output=True).returncode


def _has(config: types.ModuleType, name: str) -> bool:
    return name in config.get_config_copy()
