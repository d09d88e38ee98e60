"""The tables of a kernel on a device, with the addresses of arrays and the chunk of each program."""

import math

import numpy as np

from halfstep.kernels.c_driver import FIELDS
from halfstep.kernels.graph import Graph
from halfstep.kernels.triton_source import ROW_FIELDS, VECTOR
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.stage import Stage

CHUNK = 1 << 13
"""Elements of a chunk, a power of two, so that no chunk of a whole array crosses a multiple of 2^32."""


class DeviceTables:
    """The rows, words and chunks of a kernel, for the parameters of one table (`tables.py`).

    Attributes:
        rows: int64, a row for each parameter. Gradients and updates have the addresses of the first step.
        chunks: int32, a row (parameter, chunk index) for each program.
        fast: whether each parameter has weights and state at aligned addresses.
    """

    def __init__(self, graph: Graph, stage: Stage, table: np.ndarray) -> None:
        """Make the tables of a graph, which may have longer blocks than its stage."""
        self._changing = [i for i, x in enumerate(graph.memory) if x.name in ("g", "u")]
        self.rows = _rows(graph, stage, table)
        self.chunks = _chunks(graph, self.rows)
        self._aligned = len(graph.memory) + ROW_FIELDS.index("aligned")
        self.fast = self.rows[:, self._aligned] > 0

    def write_rows(self, table: np.ndarray, out: np.ndarray) -> None:
        """Write the rows of a step, in which gradients and updates may be at other addresses."""
        g, *u = (table[:, len(FIELDS) + i] for i in self._changing)
        for i, addresses in zip(self._changing, (g, *u), strict=True):
            self.rows[:, i] = addresses
        fast = self.fast & (u[0] % VECTOR == 0) if u else self.fast
        self.rows[:, self._aligned] = fast * (2 - (g % VECTOR != 0))
        out.view(np.int64).reshape(self.rows.shape)[:] = self.rows

    def write_words(
        self, keys: np.ndarray, numbers: np.ndarray, which: np.ndarray | None, out: np.ndarray
    ) -> None:
        """Write the keys of each parameter and the numbers of its count."""
        words, count = out.view(np.int32).reshape(len(self.rows), -1), len(keys)
        words[:, :count] = keys.view(np.int32).T
        patterns = np.ascontiguousarray(numbers, np.float32).view(np.int32)
        words[:, count:] = patterns[0] if which is None else patterns[which]


def takes(graph: Graph, stage: Stage, window: Window) -> bool:
    """Whether a device's kernel can update a window.

    A chunk may not have indices with different high halves, and a piece of a norm may not contain short
    blocks.
    """
    run = stage.blocks[0].run if stage.blocks else None
    is_short = run not in (None, math.prod(window.shape)) or stage.width != graph.width
    if graph.norms and stage.blocks and is_short:
        return False
    if window.is_empty or window.first >> 32 == window.last >> 32:
        return True
    has_runs = bool(stage.blocks) and (run is not None or stage.width != graph.width)
    return not (window.first % CHUNK or window.skip or has_runs)


def _rows(graph: Graph, stage: Stage, table: np.ndarray) -> np.ndarray:
    memory, width = graph.memory, graph.width
    addresses = table[:, len(FIELDS) :]
    given = dict(zip(FIELDS, table.T, strict=False))
    elements = given["elements"]
    # A block that was lengthened to a power of two is a run with one short block.
    run = np.where(given["run"] > 0, given["run"], elements if stage.width == width else stage.width)
    whole = (run % width == 0) | (run == elements) if graph.cuts else np.ones(len(table), bool)
    # The fast body reads whole vectors of weights and state; gradients and scales may begin anywhere.
    loose = {"g", "u", *graph.norms}
    wide = [i for i, x in enumerate(memory) if x.name not in loose and x.kind != "scale"]
    fast = whole & (given["window_skip"] == 0) & (addresses[:, wide] % VECTOR == 0).all(1)
    fields = given | {
        "aligned": 2 * fast,
        "run": np.maximum(run, 1),
        "blocks": np.maximum(-(-run // width), 1),
    }
    return np.concatenate([addresses, np.stack([fields[name] for name in ROW_FIELDS], 1)], 1)


def _chunks(graph: Graph, rows: np.ndarray) -> np.ndarray:
    elements, _, _, run, blocks, *_ = rows.T[-len(ROW_FIELDS) :]
    lengths = elements // run * blocks * graph.width if graph.cuts else elements
    counts = -(-lengths // CHUNK)
    params = np.repeat(np.arange(len(rows)), counts)
    numbers = np.arange(len(params)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([params, numbers], 1).astype(np.int32)
