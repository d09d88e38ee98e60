"""A loop in C++ over arrays, each stepped in its own memory by a kernel of Inductor for the CPU.

A call of a kernel from Python takes as long as stepping some thousand elements, and so does copying a short
array to where many are stepped by one call, tensor by tensor. The loop takes a table of addresses instead.
"""

import ctypes
import functools
import pathlib
import platform
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What a parameter of a kernel is, as in the C++ file.
_ARRAY, _NUMBERS, _FIRST, _KEYS, _COLUMN, _ROWS = range(6)
# Where addresses and numbers of 64 bits are passed alike.
_MACHINES = ("x86_64", "aarch64")
# Rows of a piece: some ten thousand elements, in which the call of a kernel is lost.
LONGEST = 64
_SOURCE = pathlib.Path(__file__).with_name("step_arrays.cpp")


class Table(NamedTuple):
    """Arrays to be stepped: int64 tensors.

    Attributes:
        pieces: in rows: the array's row of addresses, its place in the keys, the first element, and how many;
            at most `LONGEST` rows of the kernel, whole ones but for the last piece of an array.
        addresses: of every array, in the order of the kernel's tensors, where it is.
        itemsizes: of each kind of array.
        written: whether the kernel writes to each.
    """

    pieces: Tensor
    addresses: Tensor
    itemsizes: Tensor
    written: Tensor


class CppLoop:
    """Steps tables of arrays by one kernel."""

    def __init__(self, kernel: int, parameters: Sequence[tuple[int, int]], width: int) -> None:
        self._kernel, self._width = kernel, width
        self._what, self._which = torch.tensor(parameters, dtype=torch.int64, device="cpu").T.contiguous()
        self._function = _compiled_loop(len(parameters))

    def step(self, table: Table, numbers: Tensor, keys: Tensor, column: Tensor, threads: int) -> None:
        """Step all arrays of a table.

        Args:
            table: of arrays.
            numbers: of the rules, as the kernel takes them.
            keys: int32: of every column a row, with an entry for every place.
            column: 0, 1, ... up to the width.
            threads: to be used.
        """
        self._function(
            self._kernel,
            len(self._what),
            self._what.data_ptr(),
            self._which.data_ptr(),
            numbers.data_ptr(),
            column.data_ptr(),
            table.pieces.data_ptr(),
            len(table.pieces),
            table.addresses.data_ptr(),
            table.addresses.shape[1],
            table.itemsizes.data_ptr(),
            table.written.data_ptr(),
            keys.data_ptr(),
            *keys.shape,
            self._width,
            LONGEST,
            threads,
        )


def make_cpp_loop(call: Callable[..., None], calls: Sequence[Sequence[Tensor]], width: int) -> CppLoop | None:
    """Return a loop of what a compiled function calls, if that is one function of C++ and nothing else.

    Args:
        call: of tensors: arrays in rows, numbers, first indices, keys, column.
        calls: tensors of two calls, of different numbers of rows; they are stepped.
        width: elements of a row.

    Returns:
        None where that is not so, where one of the arguments is neither a tensor of these nor their number of
        rows (so it is memory of its own), or where the loop cannot be compiled: it saves time alone.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    found = _functions_called(lambda: call(*calls[0]))
    if len(found) != 1:
        return None
    ((names, function),) = found
    seen = [_arguments(names, function, lambda tensors=tensors: call(*tensors)) for tensors in calls]
    parameters = []
    for of_calls in zip(*seen, strict=True):
        known = [_places(x, tensors) for x, tensors in zip(of_calls, calls, strict=True)]
        common = known[0] & known[1]
        if not common:
            return None
        parameters.append(min(common))
    module = function.__self__
    try:
        library = ctypes.CDLL(module.__file__ if isinstance(module, types.ModuleType) else None)
        kernel = ctypes.cast(library.kernel, ctypes.c_void_p).value
        return CppLoop(kernel or 0, parameters, width)
    except (AttributeError, OSError, RuntimeError):
        return None


def _functions_called(call: Callable[[], None]) -> list[tuple[dict[str, Any], types.BuiltinFunctionType]]:
    """Return the functions of C++ that a call of compiled code calls, with the names of who calls them."""
    found = []

    def note(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__name__ == "kernel":
            found.append((frame.f_globals, arg))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def _arguments(names: dict[str, Any], function: Callable, call: Callable[[], None]) -> tuple:
    """Return the arguments that a function is given in a call; it is not called."""
    seen = []
    own = [name for name, value in names.items() if value is function]
    names.update(dict.fromkeys(own, lambda *arguments: seen.append(arguments)))
    try:
        call()
    finally:
        names.update(dict.fromkeys(own, function))
    (arguments,) = seen
    return arguments


def _places(argument: Any, tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Return what an argument may be, as the C++ file has it."""
    *arrays, numbers, first, keys, column = tensors
    if not isinstance(argument, Tensor):
        return {(_ROWS, 0)} if argument == len(first) else set()
    kinds = [(_ARRAY, i) for i in range(len(arrays))]
    kinds += [(_NUMBERS, 0), (_FIRST, 0), (_KEYS, 0), (_COLUMN, 0)]
    every = zip(kinds, [*arrays, numbers, first, keys, column], strict=True)
    return {kind for kind, x in every if x.data_ptr() == argument.data_ptr()}


@functools.cache
def _compiled_loop(parameters: int) -> Callable[..., None]:
    """Compile the loop for kernels of so many parameters."""
    from torch._inductor.codecache import CppCodeCache

    types_of = ", ".join(["std::int64_t"] * parameters)
    values = ", ".join(f"x[{i}]" for i in range(parameters))
    source = f"#define TYPES {types_of}\n#define VALUES {values}\n{_SOURCE.read_text()}"
    function = CppCodeCache.load(source).step_arrays
    function.argtypes, function.restype = [ctypes.c_int64] * 18, None
    return function
