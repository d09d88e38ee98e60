"""A kernel on a device, with its Triton module and one launch that updates all parameters of a table."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.graph import Graph, NoGeneratedForm
from halfstep.kernels.triton_process import Request, module_of
from halfstep.kernels.triton_source import ROW_FIELDS, triton_source
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.kernels.device_tables import CHUNK, DeviceTables, takes
from halfstep_torch.engine.stage import Stage
from halfstep_torch.storage.blocks import Blocks
from halfstep_torch.storage.formats import with_blocks

_BLOCK, _WARPS = 1024, 4
OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": False}
"""Options of Triton's compiler, with no product fused with a sum (contract A2)."""
Then = Callable[[Tensor, Tensor, int], None]
"""A second launch, given a kernel's rows and words, and the number of addresses in a row."""
_ALIGNED = 16
"""Alignment of each table, because Triton compiles a kernel for the alignment of its arguments."""


Untyped = Any
"""A module or a kernel of Triton, or an event of CUDA."""


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Return the version of Triton, or None if it cannot be imported."""
    try:
        major, minor, *_ = importlib.import_module("triton").__version__.split(".")
    except ImportError:
        return None
    return int(major), int(minor)


def is_exact_by_ptx() -> bool:
    """Whether roots and quotients are PTX, because Triton's own are not exact.

    Raises:
        ImportError: without Triton.
    """
    version = triton_version()
    if version is None:
        raise ImportError("Triton is not installed")
    return version < (3, 6) and not torch.version.hip


class TritonKernel:
    """The kernel of a graph on one device.

    Raises:
        NoGeneratedForm: if an operation has no form in Triton.
        ImportError: without Triton.

    Example:
        kernel(table, keys, numbers, which)  # updates the parameters of a table in one launch
    """

    def __init__(self, graph: Graph, stage: Stage, device: torch.device) -> None:
        """Make the kernel, given the graph of `in_powers_of_two(stage)`."""
        self._graph, self._stage, self._device, self.problem = graph, stage, device, ""
        self._text = triton_source(graph, exact_by_ptx=is_exact_by_ptx())
        self._module = module_of(self._text)
        tables = [node.args[0] for node in graph.nodes if node.op == "table"]
        self._codebooks = [torch.tensor(values, dtype=torch.float32, device=device) for values in tables]
        self._sizes = sizes_of(graph)
        self._of_table: tuple[np.ndarray, DeviceTables, Staging, Tensor] | None = None

    @property
    def reads_late(self) -> bool:
        """Whether it reads a table of numbers written by another kernel."""
        return bool(self._graph.late)

    def is_built(self, *, wait: bool) -> bool:
        """Whether the kernel can be launched. Triton compiles it at its first launch."""
        return True

    def request(self, target: tuple[str, int | str, int]) -> Request:
        """Return the request to compile the kernel for a target in a process, as it is launched here."""
        pointers = ["int32", "int64", "int32", *["float32"] * (len(self._codebooks) + bool(self._graph.late))]
        return Request(self._text, target, pointers, [CHUNK], {**self._sizes, **OPTIONS})

    def takes(self, stage: Stage, window: Window) -> bool:
        """Whether the kernel can update a window of a parameter."""
        return takes(self._graph, stage, window)

    def __call__(
        self,
        table: np.ndarray,
        keys: np.ndarray,
        numbers: np.ndarray,
        which: np.ndarray | None,
        *,
        late: tuple[int, Tensor] | None = None,
        totals: Tensor | None = None,
        then: Then | None = None,
    ) -> None:
        """Update the parameters of a table, as `CKernel` does. `then` reads the same tables."""
        if self._of_table is None or self._of_table[0] is not table:
            made = DeviceTables(self._graph, self._stage, table)
            words = (len(keys) + numbers.shape[1]) * len(table) * 4
            chunks = torch.from_numpy(made.chunks).to(self._device)
            self._of_table = table, made, Staging((made.rows.nbytes, words), self._device), chunks
        _, made, staging, chunks = self._of_table
        rows, words = staging.buffers()
        made.write_rows(table, rows)
        made.write_words(keys, numbers, which, words)
        tables = chunks, *staging.upload(torch.int64, torch.int32), *self._codebooks
        if self._graph.late:
            rows = np.zeros(len(table), np.int32) if which is None else which
            tables = *tables, self._late(numbers[rows], late)
        elif late is not None:
            (first, rows), of_params = late, tables[2].view(len(table), -1)
            of_params[:, len(keys) + first :][:, : rows.shape[1]] = rows.contiguous().view(torch.int32)
        self._launch(len(made.chunks), tables)
        if totals is not None:
            self._add(tables[1], made.rows.shape[1], totals)
        if then is not None:
            then(tables[1], tables[2], len(self._graph.memory))

    def _late(self, numbers: np.ndarray, late: tuple[int, Tensor] | None) -> Tensor:
        """Return the numbers that the kernel reads in their own table, given the numbers of all rules."""
        if late is not None:
            return late[1].contiguous()
        return torch.from_numpy(np.ascontiguousarray(numbers[:, self._graph.late])).to(self._device)

    def resident(self, table: np.ndarray, words: int) -> "Resident":
        """Return a launch that keeps its tables on the device, given the number of words of a parameter."""
        return Resident(self, DeviceTables(self._graph, self._stage, table), words)

    def _launch(self, programs: int, tables: Sequence[Tensor]) -> None:
        with on_device(self._device):
            self._module.step[(programs,)](*tables, CHUNK, **self._sizes, **OPTIONS)

    def _add(self, rows: Tensor, columns: int, totals: Tensor) -> None:
        """Add up the sums of each parameter's pieces."""
        place = 2, len(self._graph.memory) + ROW_FIELDS.index("elements")
        grid = totals.shape[1], len(self._graph.norms)
        with on_device(self._device):
            self._module.totals[grid](rows, totals, columns, *place, **OPTIONS)


class Resident:
    """A launch that reads its tables where another kernel writes them.

    Attributes:
        tables: the tables on the host, from which the device's were made.
        rows, words: the tables on the device.
        arrays: the number of addresses in a row.
    """

    def __init__(self, kernel: TritonKernel, tables: DeviceTables, words: int) -> None:
        self._kernel, self.tables, device = kernel, tables, kernel._device
        self.arrays = len(kernel._graph.memory)
        self.rows = torch.from_numpy(tables.rows).to(device, copy=True)
        self.words = torch.zeros(len(tables.rows), words, dtype=torch.int32, device=device)
        self._chunks = torch.from_numpy(tables.chunks).to(device)

    def launch(self) -> None:
        """Update the parameters."""
        kernel = self._kernel
        tables = self._chunks, self.rows.view(-1), self.words.view(-1), *kernel._codebooks
        kernel._launch(len(self.tables.chunks), tables)


class Staging:
    """Host memory from which the tables of a step are copied, without a wait.

    Two buffers alternate. A buffer is written again only after its last copy has ended.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._starts = [sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes[:i]) for i in range(len(sizes))]
        pinned = device.type == "cuda"
        total = self._starts[-1] + sizes[-1]
        self._buffers = [
            torch.empty(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 if pinned else 1)
        ]
        self._copied: list[Untyped] = [None for _ in self._buffers]
        self._turn = 0

    def buffers(self) -> list[np.ndarray]:
        """Return the parts of the next buffer, as bytes."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        whole = self._buffers[self._turn].numpy()
        return [whole[start : start + size] for start, size in zip(self._starts, self._sizes, strict=True)]

    def upload(self, *dtypes: torch.dtype) -> list[Tensor]:
        """Copy the buffer to the device, and return its parts there."""
        here = self._buffers[self._turn].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn] = torch.cuda.current_stream(self._device).record_event()
        parts = zip(self._starts, self._sizes, dtypes, strict=True)
        return [here[start : start + size].view(dtype) for start, size, dtype in parts]


def on_device(device: torch.device) -> Untyped:
    """Return the context of a device for Triton's launches."""
    return torch.device(device) if device.type != "cuda" else torch.cuda.device(device)


def sizes_of(graph: Graph) -> dict[str, int]:
    """Return the numbers of elements that a kernel's two bodies update at once."""
    width = graph.width if graph.cuts else 1
    block = max(_BLOCK, width)
    return {"BLOCK": block, "REST": block if graph.norms else max(32 * _WARPS, width)}


def in_powers_of_two(stage: Stage) -> Stage:
    """Return a stage with block lengths that are powers of two, as Triton needs."""
    if not stage.blocks or not stage.width & (stage.width - 1):
        return stage
    if len(stage.blocks) > 1:
        raise NoGeneratedForm("blocks within blocks whose length is no power of two")
    return with_blocks(stage, lambda fmt: fmt.blocks and Blocks(1 << (fmt.blocks.size - 1).bit_length()))
