"""Launches of generated kernels on tensors in this machine's memory.

A step of tensors on the CPU takes the kernel that a GPU would have. Where it would be launched, its PTX is
interpreted on the very tensors: all of a step is real but the hardware.
"""

import contextlib
import ctypes
import functools
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any

import compiled_torch
import numpy as np
import torch

from halfstep.kernels.graph import Graph
from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_source import ROW_FIELDS
from halfstep_torch.engine.kernels import kernel, triton_kernel
from halfstep_torch.engine.kernels.c_kernel import CKernel
from halfstep_torch.engine.kernels.device_tables import CHUNK
from halfstep_torch.engine.kernels.trace import measured, trace
from halfstep_torch.engine.kernels.triton_kernel import TritonKernel
from ptx.approximations import Approximations
from ptx.kernel import parse
from ptx.launch import WARP, Launch
from ptx.memory import Memory

TARGET = "sm_90"


class TritonLaunches:
    """Kernels of steps, and what launches them.

    Attributes:
        approximations: what approximate operations give.
        texts: the PTX of the kernels that were launched, by name.
        launches: so far.
        executed: instructions in them.
    """

    def __init__(self) -> None:
        self.approximations, self.texts = Approximations(), {}
        self.launches, self.executed = 0, 0

    @contextlib.contextmanager
    def as_on_gpu(self) -> Iterator[None]:
        """Let steps of tensors on the CPU take kernels of a GPU, which are interpreted."""

        def generated(
            stage: Any, places: Any, incoming: torch.dtype, device: torch.device, sums: str = ""
        ) -> CKernel | TritonKernel:
            if sums:  # whose bits Triton's own interpreter gives
                return CKernel(simplified(measured(trace(stage, places, incoming), sums)))
            graph = simplified(trace(triton_kernel.in_powers_of_two(stage), places, incoming))
            return _Interpreted(self, graph, stage, device)

        kernel.kernel_of.cache_clear()
        # The trial of a kernel would be interpreted too, and takes longer than a step.
        trial = unittest.mock.patch.object(kernel.Kernel, "_has_same_bits", return_value=True)
        with trial, unittest.mock.patch.object(kernel, "generated", generated):
            yield
        kernel.kernel_of.cache_clear()

    def run(self, graph: Graph, programs: int, tables: Sequence[torch.Tensor]) -> None:
        """Interpret a kernel."""
        program = _compiled(graph)
        (made,) = parse(program.text).values()
        self.texts[f"{made.name} {len(self.texts)}"] = program.text
        arguments = [*(x.data_ptr() for x in tables), CHUNK]
        # Last come addresses of scratch memory, for which these kernels do not ask.
        arguments += [0] * (len(made.parameters) - len(arguments))
        block = (WARP * program.binary.metadata.num_warps, 1, 1)
        memory, shared = _memory(graph, tables), program.binary.metadata.shared
        launch = Launch(made, (programs, 1, 1), block, arguments, memory, self.approximations, shared)
        launch.run()
        self.launches += 1
        self.executed += launch.executed


class _Interpreted(TritonKernel):
    """A kernel whose launches are interpreted."""

    def __init__(self, launches: TritonLaunches, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._launches = launches

    def _launch(self, programs: int, tables: Sequence[torch.Tensor]) -> None:
        self._launches.run(self._graph, programs, tables)


@functools.cache
def _compiled(graph: Graph) -> compiled_torch.Program:
    return compiled_torch.compile_graph(graph, TARGET)


def _memory(graph: Graph, tables: Sequence[torch.Tensor]) -> Memory:
    """Return the memory of the tables and of the arrays that they name, and no other."""
    memory, arrays = Memory(), graph.memory
    for table in tables:
        memory.add(table.data_ptr(), table.numpy().view(np.uint8).reshape(-1))
    for row in tables[1].reshape(-1, len(arrays) + len(ROW_FIELDS)).tolist():
        fields = dict(zip(ROW_FIELDS, row[len(arrays) :], strict=True))
        runs = fields["elements"] // fields["run"]
        for address, array in zip(row, arrays, strict=False):
            entries = fields["elements"]
            if array.shared > 1:
                entries = runs * -(-fields["run"] // array.shared)
            size = entries * getattr(torch, array.dtype).itemsize
            if size:
                memory.add(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
    return memory
