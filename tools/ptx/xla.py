"""A program that XLA compiled for a GPU: its memory, its copies and loops, and the launches of its kernels.

XLA dumps what it made: scheduled HLO, which says in which order kernels are launched; the buffer assignment,
which says where every value is; the PTX of each kernel; and the sizes of their launches.
(`xla_dump_to`, `xla_dump_hlo_as_text` and `xla_dump_large_constants` among the options of the compiler.)
"""

import math
import pathlib
import re

import numpy as np

from ptx import hlo
from ptx.approximations import Approximations
from ptx.kernel import parse
from ptx.launch import Launch
from ptx.memory import POISON, Memory, poisoned

# Each allocation stands in a gigabyte of addresses.
_BASE, _APART = 1 << 32, 1 << 30
_VALUE = r"value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
_THREE = r"\[(\d+), (\d+), (\d+)\]"
_THUNK = rf"^\s*(\d+): kCustomKernel.*?\] (\S+) grid: {_THREE} threads: {_THREE}\s+shared_memory: (\d+)"
_APPROXIMATE = re.compile(r"\.(?:approx|full)\b")
_UNTOUCHED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")

Place = tuple[int, int]  # an address, and how many bytes


class Program:
    """A compiled function, and memory for it.

    Attributes:
        texts: the PTX of every kernel, by name.
        kernels: the same, understood. A test may put another in the place of one.
        approximations: what approximate operations give.
        launches: of kernels, so far.
        executed: instructions in them.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.texts = {name: text for text in _texts(folder, "*.ptx") for name in parse(text)}
        self.kernels = {name: parse(text)[name] for name, text in self.texts.items()}
        self.approximations, self.launches, self.executed = Approximations(), 0, 0
        (text,) = _texts(folder, "*gpu_after_optimizations.txt")
        self._module = hlo.parse(text)
        self._ops = {op.name: op for ops in self._module.computations.values() for op in ops}
        self._inside = {op.name: name for name, ops in self._module.computations.items() for op in ops}
        self._callers = {name: op for op in self._ops.values() for name in _called(op)}
        self._thunks = _thunks(folder)
        self._memory, self._allocations, self._temporary = Memory(), [], []
        self._places: dict[tuple[str, str], Place] = {}
        self._parameters: dict[int, Place] = {}
        self._allocate(_texts(folder, "*after_optimizations-buffer-assignment.txt")[0])
        for op in self._ops.values():
            # Scalars are in the PTX. In the place of arrays it has zeros, and a loader would copy them.
            if op.kind == "constant" and (op.name, "") in self._places:
                self._bytes(self._where(op.name))[:] = np.frombuffer(hlo.constant(op).tobytes(), np.uint8)

    def run(self, arguments: list[np.ndarray]) -> list[np.ndarray]:
        """Run the function: take its arguments' arrays in order, return those of its result, as bytes."""
        if len(arguments) != len(self._parameters):
            raise ValueError(f"{len(arguments)} arrays for {len(self._parameters)} parameters")
        for array in self._temporary:
            array[:] = POISON
        for n, array in enumerate(arguments):
            data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
            self._bytes(self._parameters[n])[:] = data
        self._run(self._module.entry)
        root = self._root(self._module.entry)
        is_tuple = root.kind == "tuple"
        places = [self._where(name) for name in root.operands] if is_tuple else self._results(root)
        return [self._bytes(place).copy() for place in places]

    def approximating(self) -> list[str]:
        """Return the kernels over arrays that approximate: of several, two may evaluate the same operands."""
        launched = {name for name, grid, block, _ in self._thunks.values() if math.prod((*grid, *block)) > 1}
        return [name for name in sorted(launched) if _APPROXIMATE.search(self.texts[name])]

    def _allocate(self, text: str) -> None:
        """Make memory, poisoned, and note where each value is."""
        blocks = re.split(r"^(?=allocation \d+:)", text.split("\nUsed values")[0], flags=re.MULTILINE)[1:]
        for n, block in enumerate(blocks):
            match = re.match(r"allocation (\d+): size (\d+), (?:parameter (\d+),|(constant):)?", block)
            assert match
            assert int(match[1]) == n
            start, array = _BASE + n * _APART, poisoned(-(-int(match[2]) // 256) * 256)
            self._memory.add(start, array)
            self._allocations.append(array)
            if match[3]:
                self._parameters[int(match[3])] = start, int(match[2])
            elif not match[4]:
                self._temporary.append(array)
            for name, index, count, offset in re.findall(_VALUE, block):
                self._places[name, index] = start + int(offset), int(count)

    def _bytes(self, place: Place) -> np.ndarray:
        number, start = divmod(place[0] - _BASE, _APART)
        return self._allocations[number][start : start + place[1]]

    def _root(self, computation: str) -> hlo.Op:
        (root,) = (op for op in self._module.computations[computation] if op.is_root)
        return root

    def _where(self, name: str, index: str = "") -> Place:
        """Return where a value is, or one of a tuple, by its place in that."""
        op = self._ops[name]
        if op.kind == "get-tuple-element":
            return self._where(op.operands[0], ",".join(filter(None, (op.attribute("index"), index))))
        if op.kind == "bitcast":
            return self._where(op.operands[0], index)
        if op.kind == "tuple" and index:
            first, _, rest = index.partition(",")
            return self._where(op.operands[int(first)], rest)
        if (name, index) in self._places:
            return self._places[name, index]
        if op.kind == "while":
            return self._where(op.operands[0], index)
        if op.kind == "conditional":
            (place,) = {self._where(self._root(branch).name, index) for branch in _called(op)}
            return place
        caller = self._callers.get(self._inside[name])
        if op.kind == "parameter" and caller:
            of_caller = caller.operands[_called(caller)[self._inside[name]]]
            return self._where(of_caller, index)
        raise LookupError(f"where is {name}{{{index}}}?")

    def _results(self, op: hlo.Op) -> list[Place]:
        """Return where the results of an operation are."""
        if not op.shape.startswith("("):
            return [self._where(op.name)]
        return [self._where(op.name, str(n)) for n in range(len(hlo.arrays(op.shape)))]

    def _run(self, computation: str) -> None:
        for op in self._module.computations[computation]:
            if op.kind in _UNTOUCHED:
                continue
            if op.kind == "copy":
                self._bytes(self._where(op.name))[:] = self._bytes(self._where(op.operands[0]))
            elif op.kind == "while":
                while self._is_true(op):
                    self._run(op.attribute("body"))
            elif op.kind == "conditional":
                chosen = self._bytes(self._where(op.operands[0]))[0]
                self._run(op.attribute("true_computation" if chosen else "false_computation"))
            elif op.kind == "fusion":
                self._fusion(op)
            else:
                raise NotImplementedError(f"{op.kind}: {op.name}")

    def _is_true(self, loop: hlo.Op) -> bool:
        condition = loop.attribute("condition")
        self._run(condition)
        return bool(self._bytes(self._where(self._root(condition).name))[0])

    def _fusion(self, op: hlo.Op) -> None:
        """Launch a kernel; or copy, where a fusion is no more than a part of an array."""
        if op.name in self._thunks:
            name, grid, block, shared = self._thunks[op.name]
            arguments = [place[0] for place in (*map(self._where, op.operands), *self._results(op))]
            launch = Launch(
                self.kernels[name], grid, block, arguments, self._memory, self.approximations, shared
            )
            launch.run()
            self.launches += 1
            self.executed += launch.executed
            return
        root = self._root(op.attribute("calls"))
        # Along one axis, the first, it is contiguous.
        match = re.match(r", slice=\{\[(\d+):\d+\]\}", root.attributes)
        if root.kind != "slice" or match is None:
            raise NotImplementedError(f"{op.name}: no kernel for {root.kind}{root.attributes[:80]}")
        ((dtype, _),) = hlo.arrays(op.shape)
        start = self._where(op.operands[0])[0] + int(match[1]) * dtype.itemsize
        self._bytes(self._where(op.name))[:] = self._bytes((start, hlo.size(op.shape)))


def _texts(folder: pathlib.Path, pattern: str) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob(pattern))]


def _called(op: hlo.Op) -> dict[str, int]:
    """Return the computations of a loop or a choice, and which operand each of them is given."""
    if op.kind == "while":
        return {op.attribute("body"): 0, op.attribute("condition"): 0}
    if op.kind == "conditional":
        return {op.attribute("true_computation"): 1, op.attribute("false_computation"): 2}
    return {}


def _thunks(folder: pathlib.Path) -> dict[str, tuple]:
    """Return the launches by the fusion that they are for: kernel, grid, block, bytes of shared memory.

    A kernel may have the name of another fusion that is alike: the number of the thunk tells which one it is.
    """
    (metadata,), (sequence,) = _texts(folder, "*thunk_metadata.txt"), _texts(folder, "*thunk_sequence.txt")
    launches = {}
    for number, name, *sizes in re.findall(_THUNK, sequence, re.MULTILINE):
        *sizes, shared = map(int, sizes)
        launches[int(number)] = name, tuple(sizes[:3]), tuple(sizes[3:]), shared
    named = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
    thunks = {name: launches[int(number)] for name, number in named if int(number) in launches}
    if len(thunks) != len(launches):
        raise ValueError("launches that are for no fusion, or several for one")
    return thunks
