"""A device whose two kernels of a capturable step run on the CPU, and a graph that records their launches.

The step's kernel is the C form of its graph, given the tables of the device. The launch before it computes
with the functions that its Triton text is traced from.
"""

import contextlib
import ctypes
import functools
import unittest.mock
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.kernels.c_driver import FIELDS
from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_numbers import COMING
from halfstep.kernels.triton_source import ROW_FIELDS
from halfstep_torch.engine import capture
from halfstep_torch.engine.kernels import ahead_kernel, kernel, triton_kernel
from halfstep_torch.engine.kernels.c_kernel import CKernel
from halfstep_torch.engine.kernels.trace import measured, trace
from halfstep_torch.leaves.checks import LAST_STEP

_patch = unittest.mock.patch.object


class Graph:
    """What `torch.cuda.CUDAGraph` is: launches that are recorded once, and replayed.

    Attributes:
        launches: that were recorded.
        operations: of torch, at the time.
    """

    recording: "Graph | None" = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self.operations: list[str] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record what is launched inside, and run none of it."""
        is_initialized = _patch(torch.cuda, "is_initialized", return_value=True)
        is_capturing = _patch(torch.cuda, "is_current_stream_capturing", return_value=True)
        try:
            Graph.recording = self
            with is_initialized, is_capturing, _Operations(self.operations):
                yield
        finally:
            Graph.recording = None

    def replay(self) -> None:
        """Run what was recorded."""
        for launch in self.launches:
            launch()


class _Operations(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def recorded(launch: Callable[..., None]) -> Callable[..., None]:
    """Return what launches at once, or into the graph that is being captured."""

    @functools.wraps(launch)
    def run(*arguments: object) -> None:
        if Graph.recording is None:
            launch(*arguments)
        else:
            Graph.recording.launches.append(functools.partial(launch, *arguments))

    return run


class _Kernel(triton_kernel.TritonKernel):
    """The kernel of a step, in C, with the tables of a device."""

    def __init__(self, graph, stage, device) -> None:
        self._graph, self._stage, self._device, self.problem = graph, stage, device, ""
        self._codebooks, self._of_table, self._kernel = [], None, CKernel(graph)

    def is_built(self, *, wait: bool) -> bool:
        return self._kernel.is_built(wait=True)

    @recorded
    def _launch(self, programs, tables) -> None:
        _, rows, words = (table.numpy() for table in tables)
        arrays, keys = len(self._graph.memory), self._graph.keys
        rows = rows.reshape(-1, arrays + len(ROW_FIELDS))
        words = words.reshape(len(rows), -1)
        given = dict(zip(ROW_FIELDS, rows[:, arrays:].T, strict=True))
        fields = [given[name] for name in FIELDS]
        table = np.concatenate([np.stack(fields, 1), rows[:, :arrays]], 1)
        of_params = np.arange(len(rows), dtype=np.int32)
        numbers = np.ascontiguousarray(words[:, keys:]).view(np.float32)
        self._kernel(table, np.ascontiguousarray(words[:, :keys].T).view(np.uint32), numbers, of_params)


@recorded
def _ahead(self, programs, arguments) -> None:
    """Do what the function `ahead` of `halfstep.kernels.triton_numbers` does."""
    given, rows, words, counts, leaves, fast, parameters = arguments
    given, hyper = given.numpy(), sum(map(len, self._fields))
    addresses = given[1 + 2 * hyper :][:parameters]
    aligned, elements = (self._arrays + ROW_FIELDS.index(x) for x in ("aligned", "elements"))
    rows[:, 1] = torch.from_numpy(addresses)
    rows[:, aligned] = fast * torch.from_numpy(2 - (addresses % 16 != 0))
    if not given[0]:
        rows[:, elements] = 0
        return
    places = [ctypes.c_int64.from_address(x) for x in counts.tolist()]
    for place in places:
        place.value = min(place.value + 1, LAST_STEP)
    inputs = {"count": torch.tensor([[place.value] for place in places])}
    inputs["coming"] = torch.arange(1.0, COMING + 1)[None].expand(parameters, COMING)
    for i, (address, pattern) in enumerate(zip(given[1:][:hyper], given[1 + hyper :][:hyper], strict=True)):
        there = ctypes.c_int32.from_address(int(address)).value if address else int(pattern)
        inputs[f"number.{i}"] = torch.tensor(there, dtype=torch.int32).view(torch.float32)
    for i in range(len(self._streams)):
        for k, name in enumerate(("leaf", "high", "low")):
            inputs[f"{name}.{i}"] = leaves[:, 3 * i + k : 3 * i + k + 1]
    for i, word in enumerate(self._words(inputs)):
        words[:, i : i + 1] = word if word.dtype == torch.int32 else word.view(torch.int32)


@contextlib.contextmanager
def emulated_device() -> Iterator[None]:
    """Let steps of tensors on the CPU take the kernels of a device."""

    def generated(stage, places, incoming, device, sums=""):
        graph = trace(triton_kernel.in_powers_of_two(stage), places, incoming)
        if sums:
            return CKernel(simplified(measured(graph, sums)))
        return _Kernel(simplified(graph), stage, device)

    kernel.kernel_of.cache_clear()
    text = _patch(ahead_kernel, "module_of"), _patch(ahead_kernel, "is_exact_by_ptx", return_value=False)
    trial = _patch(kernel.Kernel, "_has_same_bits", return_value=True)
    launch = _patch(ahead_kernel.AheadKernel, "_launch", _ahead)
    device = _patch(capture, "may_capture", return_value=True)
    with text[0], text[1], trial, launch, device, _patch(kernel, "generated", generated):
        yield
    kernel.kernel_of.cache_clear()
