"""A launch of a kernel in NumPy: every register is an array over all threads.

Threads run in step. Of the groups that branches have parted, the one that is furthest behind goes first, so
that groups meet again. This is an order that a GPU may take; what another order would change (a race, a
barrier that is missing within a warp) is not seen.
"""

import functools
from typing import Any

import ml_dtypes
import numpy as np

from ptx.approximations import Approximations
from ptx.kernel import Address, Guard, Instruction, Kernel, Operand, bits
from ptx.memory import POISON, UNSIGNED, Memory, poisoned
from ptx.operations import operation_of

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
# The NaN that operations make; its pattern is NVIDIA's.
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}
WARP = 32
Sizes = tuple[int, int, int]


class Launch:
    """One launch: `run` executes it.

    Attributes:
        kernel: that is launched.
        memory: global memory.
        shared: of all blocks, one behind the other.
        approximations: what approximate operations give.
        count: threads.
        block: the number of each thread's block.
        lane: of each thread, within its warp.
        active: threads that execute the present instruction; None where all do.
        executed: instructions so far, each once for all threads.
    """

    def __init__(
        self, kernel: Kernel, grid: Sizes, block: Sizes, arguments: list[int], memory: Memory,
        approximations: Approximations, shared: int = 0,
    ) -> None:  # fmt: skip
        if len(arguments) != len(kernel.parameters):
            expected = f"{len(arguments)} arguments for {len(kernel.parameters)} parameters"
            raise ValueError(f"{kernel.name}: {expected}")
        if kernel.block not in (None, block):
            raise ValueError(f"{kernel.name}: blocks of {block}, declared as {kernel.block}")
        self.kernel, self.memory, self.approximations = kernel, memory, approximations
        self.parameters = {
            name: np.array([value & ((1 << width) - 1)], UNSIGNED[width])
            for (name, width), value in zip(kernel.parameters, arguments, strict=True)
        }
        threads = int(np.prod(block))
        self.count = threads * int(np.prod(grid))
        index = np.arange(self.count, dtype=np.uint32)
        self.block, self.lane = index // np.uint32(threads), index % np.uint32(threads) % np.uint32(WARP)
        self._special = {"%laneid": self.lane}
        for name, size in zip(("tid", "ctaid"), (block, grid), strict=True):
            for axis, length in zip("xyz", size, strict=True):
                self._special[f"%{name}.{axis}"] = index % np.uint32(length)
                self._special[f"%n{name}.{axis}"] = np.array([length], np.uint32)
                index = index // np.uint32(length)
        self.stride = max(16, -(-max(shared, kernel.shared) // 16) * 16)
        self.shared = Memory()
        self.shared.add(0, poisoned(self.count // threads * self.stride))
        self._registers: dict[str, np.ndarray] = {}
        self.active: np.ndarray | None = None
        self.executed = 0
        self._all = np.ones(self.count, bool)

    def run(self) -> None:
        """Execute the kernel in all threads."""
        groups = {0: self._all.copy()}
        with np.errstate(all="ignore"):
            while groups:
                self._run_group(groups)

    def _run_group(self, groups: dict[int, np.ndarray]) -> None:
        """Run the group that is furthest behind until it ends, branches or meets another."""
        body, at = self.kernel.body, min(groups)
        here = groups.pop(at)
        meeting = min(groups, default=None)
        active = None if here.all() else here
        while at != meeting:
            i = body[at]
            executing = here & self._guard(i.guard) if i.guard else here
            self.executed += 1
            if i.opcode in ("ret", "exit"):
                here = active = here & ~executing
                if not here.any():
                    return
            elif i.opcode in ("bra", "bra.uni"):
                parts = ((self.kernel.labels[str(i.operands[0])], executing), (at + 1, here & ~executing))
                for place, part in parts:
                    if part.any():
                        groups[place] = groups.get(place, False) | part
                return
            elif i.opcode in ("bar.sync", "barrier.sync", "barrier.sync.aligned"):
                self._check_barrier(here, executing, groups)
            elif i.guard is None:
                self._execute(i, active)
            elif executing.any():
                self._execute(i, None if executing.all() else executing)
            at += 1
        groups[at] |= here

    def _execute(self, i: Instruction, active: np.ndarray | None) -> None:
        self.active = active
        try:
            operation_of(i.opcode)(self, *i.operands)
        except Exception as error:
            raise type(error)(f"{error} (in {self.kernel.name}: {i.text})") from error

    def _check_barrier(self, here: np.ndarray, executing: np.ndarray, groups: dict) -> None:
        """Refuse a barrier that some threads of a block reach and others, which still run, do not."""
        elsewhere = [self.block[group] for group in groups.values()]
        if (here != executing).any() or np.isin(self.block[here], np.concatenate([*elsewhere, []])).any():
            raise RuntimeError(f"{self.kernel.name}: not all threads of a block reach a barrier together")

    def _guard(self, guard: Guard) -> np.ndarray:
        value = np.broadcast_to(self.read(guard.predicate, "pred"), self.count)
        return ~value if guard.negated else value

    def everywhere(self, values: np.ndarray) -> np.ndarray:
        """Return a number for each thread."""
        return np.broadcast_to(values, self.count)

    def executing(self) -> np.ndarray:
        """Return the threads that execute the present instruction."""
        return self._all if self.active is None else self.active

    def read(self, operand: Operand, kind: str, relaxed: bool = False) -> np.ndarray:
        """Return an operand: bool of `pred`, floats of one float, integers of `s` and `u`, else patterns.

        Args:
            operand: a number, a register, a symbol, or several that are packed, the lowest first.
            kind: the type.
            relaxed: whether the register may be wider, as in conversions and stores.
        """
        if kind == "pred":
            return self._predicate(operand)
        width = bits(kind)
        value = self._pattern(operand, width, relaxed)
        if kind in FLOATS:
            return value.view(FLOATS[kind])
        return value.view(SIGNED[width]) if kind[0] == "s" else value

    def _predicate(self, operand: Operand) -> np.ndarray:
        if isinstance(operand, int):
            return np.array([bool(operand)])
        name = str(operand)
        if name.startswith("!"):
            return ~self._predicate(name[1:])
        if self.kernel.width(name) != 1:
            raise TypeError(f"{name} is no predicate")
        return self._registers[name]

    def _pattern(self, operand: Operand, width: int, relaxed: bool) -> np.ndarray:
        dtype = UNSIGNED[width]
        if isinstance(operand, Address):
            raise TypeError("an address where a number should be")
        if isinstance(operand, int):
            return _number(operand, width)
        if isinstance(operand, tuple):
            part = width // len(operand)
            values = [self._pattern(x, part, False).astype(dtype) for x in operand]
            return sum((x << dtype(part * n) for n, x in enumerate(values)), np.zeros(1, dtype))
        if operand in self._special:
            value = self._special[operand]
        elif operand in self.kernel.symbols:
            value = np.array([self.kernel.symbols[operand]], dtype)
        else:
            value = self._register(operand)
        if value.itemsize * 8 != width and not (relaxed and value.itemsize * 8 > width):
            raise TypeError(f"{operand} has {value.itemsize * 8} bits, not {width}")
        return value.astype(dtype, copy=False)

    def _register(self, name: str) -> np.ndarray:
        width = self.kernel.width(name)
        if width == 1:
            raise TypeError(f"{name} is a predicate")
        # Compilers read some that nothing was written to, and do not use what they read.
        return self._registers[name] if name in self._registers else poison(width)

    def write(self, operand: Operand, value: Any, relaxed: bool = False) -> None:
        """Write a result: to a register, or to several, the lowest part first.

        Args:
            operand: where to; "_" for nowhere.
            value: bool for a predicate; else integers or floats of the width of the register.
            relaxed: whether the register may be wider: a number with a sign is extended by it.
        """
        value = np.asarray(value)
        if isinstance(operand, tuple):
            part = 8 * value.itemsize // len(operand)
            pattern = value.view(UNSIGNED[8 * value.itemsize])
            for n, x in enumerate(operand):
                self.write(x, (pattern >> pattern.dtype.type(part * n)).astype(UNSIGNED[part]))
            return
        name = str(operand)
        if name == "_":
            return
        width = self.kernel.width(name)
        if (width == 1) != (value.dtype == bool):
            raise TypeError(f"{name} has {width} bits, and {value.dtype} is written")
        if width > 1:
            value = value if value.dtype.kind in "ui" else value.view(UNSIGNED[8 * value.itemsize])
            if 8 * value.itemsize != width and not (relaxed and 8 * value.itemsize < width):
                raise TypeError(f"{name} has {width} bits, not {8 * value.itemsize}")
            value = value.astype(UNSIGNED[width], copy=False)
        if self.active is not None:
            before = self._registers.get(name, np.zeros(1, bool) if width == 1 else poison(width))
            value = np.where(self.active, value, before)
        self._registers[name] = value

    def write_float(self, operand: Operand, value: np.ndarray, kind: str) -> None:
        """Write the result of a float operation: every NaN is NVIDIA's."""
        pattern = np.asarray(value, FLOATS[kind]).view(UNSIGNED[bits(kind)])
        nan = np.isnan(value)
        self.write(operand, np.where(nan, UNSIGNED[bits(kind)](NAN[kind]), pattern) if nan.any() else pattern)


@functools.cache
def _number(value: int, width: int) -> np.ndarray:
    return np.array([value & ((1 << width) - 1)], UNSIGNED[width])


@functools.cache
def poison(width: int) -> np.ndarray:
    """Return a number of so many bits to which nothing was written."""
    return np.full(width // 8, POISON, np.uint8).view(UNSIGNED[width])
