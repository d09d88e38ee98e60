"""The trial of a new kernel: on scratch memory it must have the bits of XLA, before a step calls it."""

import ctypes
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.kernels.graph import Graph, is_float
from halfstep_jax.kernels.program import Program
from halfstep_jax.kernels.rows import run_on_rows, shape_on_rows
from halfstep_jax.leaf_calls import waiting_calls

_STEPS = 3
_WIDTH = 101
"""Elements of a row if no format has blocks: some remain after the last whole vector."""

Arrays = dict[str, np.ndarray]


Step = Callable[[Arrays, np.ndarray, np.ndarray], None]
"""Steps the arrays of one leaf in place, given its keys and numbers."""


def has_same_bits(program: Program, graph: Graph, step: Step) -> bool:
    """Whether steps of a kernel have the bits of XLA, except for NaN.

    Arrays that steps replace begin as zero bytes. The others, such as gradients, are drawn anew at each step.
    """
    rng, width = np.random.default_rng(0), program.cuts[0] if program.cuts else _WIDTH
    numbers = rng.uniform(0.25, 0.75, max(program.numbers, 1)).astype(np.float32)
    keys = np.arange(1, 2 * max(graph.keys, 1) + 1, 2, dtype=np.uint32)
    given = {f"number.{i}": numbers[i] for i in range(program.numbers)}
    given |= {f"key.{i}": key for i, key in enumerate(keys)}
    memory = {x.name: np.zeros(shape_on_rows(x, width), jnp.dtype(x.dtype)) for x in graph.memory}
    replaced = {row.name for _, _, row in program.results}

    @jax.jit
    def by_xla(given: dict[str, jax.Array], zero: jax.Array) -> list[jax.Array]:
        with waiting_calls(None):
            return run_on_rows(program, given, width, zero)

    for _ in range(_STEPS):
        for x in program.arrays:
            if x.name not in replaced and is_float(x.dtype):
                memory[x.name] = rng.standard_normal(memory[x.name].shape).astype(memory[x.name].dtype)
        arrays = {x.name: memory[x.name].copy() for x in program.arrays}
        expected = by_xla(given | arrays, np.uint32(0))
        step(memory, keys, numbers)
        for x, (_, _, row) in zip(expected, program.results, strict=True):
            if not _same(memory[row.name], np.asarray(x)):
                return False
    return True


def step_by_library(library: ctypes.CDLL) -> Step:
    """Return the step of a C library: of a leaf that no window cuts, and whose blocks are all whole."""

    def step(arrays: Arrays, keys: np.ndarray, numbers: np.ndarray) -> None:
        n = max(x.size for x in arrays.values())
        table = np.array([n, 0, 0, n, 0, *(x.ctypes.data for x in arrays.values())], np.int64)
        pointers = (ctypes.c_void_p(x.ctypes.data) for x in (table, keys, numbers))
        library.step(ctypes.c_int64(1), *pointers, None, 0, ctypes.c_int64(n), 1, None)

    return step


def _same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether all bits are equal, or both are NaN."""
    patterns = f"u{ours.itemsize}"
    equal = ours.view(patterns) == theirs.reshape(ours.shape).view(patterns)
    if is_float(str(ours.dtype)):
        equal |= np.isnan(ours.astype(np.float32)) & np.isnan(theirs.astype(np.float32).reshape(ours.shape))
    return math.prod(equal.shape) == np.count_nonzero(equal)
