"""A kernel on a CPU, with its C library and one call that updates all parameters of a table."""

import ctypes
import functools
import pathlib

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.build import Library
from halfstep.kernels.c_driver import FIELDS
from halfstep.kernels.c_source import c_source
from halfstep.kernels.graph import Graph

_ARGUMENTS = [
    ctypes.c_int64,
    *[ctypes.c_void_p] * 4,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_void_p,
]


class CKernel:
    """The kernel of a graph in C.

    Raises:
        NoGeneratedForm: if an operation has no form in C.
    """

    def __init__(self, graph: Graph) -> None:
        self._library, self._function = Library(c_source(graph)), None
        self._name = "norms" if graph.norms else "step"

    @property
    def problem(self) -> str:
        """The reason why there is no kernel, or ""."""
        return self._library.problem

    def is_built(self, *, wait: bool) -> bool:
        """Whether the library is built, after the compiler ends if `wait`."""
        if self._function is None and (library := self._library.get(wait=wait)) is not None:
            self._function = getattr(library, self._name)
            self._function.restype = None
            self._function.argtypes = _ARGUMENTS if self._name == "step" else [*_ARGUMENTS, ctypes.c_void_p]
        return self._function is not None

    def __call__(
        self,
        table: np.ndarray,
        keys: np.ndarray,
        numbers: np.ndarray,
        which: np.ndarray | None,
        *,
        late: tuple[int, Tensor] | None = None,
        totals: Tensor | None = None,
    ) -> None:
        """Update the parameters of a table, as `Kernel.__call__`."""
        assert self._function is not None
        if late is not None:
            first, rows = late
            numbers = numbers[which if which is not None else np.zeros(len(table), np.int32)]
            numbers[:, first : first + rows.shape[1]] = rows
            which = np.arange(len(table), dtype=np.int32)
        self._function(
            len(table), table.ctypes.data, keys.ctypes.data, numbers.ctypes.data,
            None if which is None else which.ctypes.data, numbers.shape[-1],
            int(table[:, FIELDS.index("elements")].sum()), torch.get_num_threads(), _openmp_team(),
            *([] if totals is None else [totals.data_ptr()]),
        )  # fmt: skip


@functools.cache
def _openmp_team() -> ctypes.c_void_p | None:
    """Return the function of PyTorch's OpenMP library that runs a team of threads, if it is GNU's."""
    try:
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if "libgomp" in line:
            return ctypes.cast(ctypes.CDLL(line.split()[-1]).GOMP_parallel, ctypes.c_void_p)
    return None
