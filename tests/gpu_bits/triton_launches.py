"""Launches of Triton's kernels on tensors in this machine's memory.

Inductor writes Triton for tensors on the CPU, too (`benchmarks/compiled_torch.py`). Where it would launch a
kernel, its PTX is interpreted on the very tensors: all of a step is real but the hardware.
"""

import contextlib
import functools
import tempfile
import unittest.mock
from collections.abc import Iterator
from typing import Any

import compiled_torch
import torch
import torch._inductor.runtime.triton_heuristics as heuristics
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from ptx.approximations import Approximations
from ptx.kernel import Kernel, parse
from ptx.launch import WARP, Launch
from ptx.memory import Memory

TARGET = "sm_90"


class TritonLaunches:
    """Kernels that torch.compile made, and what launches them.

    Attributes:
        approximations: what approximate operations give.
        texts: the PTX of the kernels that were launched, by name.
        launches: so far.
        executed: instructions in them.
    """

    def __init__(self) -> None:
        self.approximations, self.texts = Approximations(), {}
        self.launches, self.executed = 0, 0
        self._compiling = False
        self._compile = triton.compile
        self._binaries: dict[Any, Any] = {}

    @contextlib.contextmanager
    def as_on_gpu(self) -> Iterator[None]:
        """Let compiled steps be made of PTX, and interpreted."""
        with compiled_torch.as_on_gpu(self._compile_for_gpu, self._run, self._only_compiling):
            yield

    @contextlib.contextmanager
    def _only_compiling(self) -> Iterator[None]:
        """Compile what is called inside, and run nothing: its memory is a million elements of no interest."""
        self._compiling = True
        try:
            yield
        finally:
            self._compiling = False

    def _compile_for_gpu(self, source: Any, target: Any, options: dict[str, Any]) -> Any:
        """Put off compiling: of the shapes of a kernel that Inductor offers one is interpreted."""
        return unittest.mock.MagicMock(source=source, options=options)

    def _compiled(self, offered: Any) -> Any:
        """Compile as far as PTX: machine code takes as long again, and is of no use here."""
        if offered not in self._binaries:
            target = GPUTarget(*compiled_torch.TARGETS[TARGET])
            no_code = unittest.mock.patch.object(CUDABackend, "make_cubin", return_value=b"")
            # Others must not find a program without machine code in their cache.
            with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), no_code:
                triton.knobs.cache.dir = folder
                self._binaries[offered] = self._compile(
                    offered.source, target=target, options=offered.options
                )
        return self._binaries[offered]

    def _run(self, autotuner: Any, *values: Any) -> None:
        """Interpret a kernel in the first shape that Inductor offers, which is its guess."""
        autotuner.precompile()
        if self._compiling:
            return
        result = autotuner.compile_results[0]
        binary, source = self._compiled(result.kernel), result.kernel.source
        kernel = _parsed(binary.asm["ptx"])
        self.texts[kernel.name] = binary.asm["ptx"]
        names = [name for name in source.fn.arg_names if name not in result.config.kwargs]
        given = dict(zip(names, values, strict=True))
        constant = {source.fn.arg_names[place[0]] for place in source.constants}
        passed = [n for n, kind in source.signature.items() if kind != "constexpr" and n not in constant]
        arguments = [_address_or_number(given[name]) for name in passed]
        # Last come addresses of scratch memory, for which these kernels do not ask.
        arguments += [0] * (len(kernel.parameters) - len(arguments))
        sizes = heuristics.GridExpr.from_meta(autotuner.inductor_meta, result.config)
        grid = sizes.eval_slow({**given, **result.config.kwargs})
        block = (WARP * binary.metadata.num_warps, 1, 1)
        memory = _memory([given[name] for name in passed])
        launch = Launch(kernel, grid, block, arguments, memory, self.approximations, binary.metadata.shared)
        launch.run()
        self.launches += 1
        self.executed += launch.executed


@functools.cache
def _parsed(text: str) -> Kernel:
    (kernel,) = parse(text).values()
    return kernel


def _address_or_number(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else int(value)


def _memory(values: list[Any]) -> Memory:
    """Return the memory of tensors, and no other."""
    memory, seen = Memory(), set()
    for value in values:
        storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
        if storage and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            memory.add(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
    return memory
