"""The graph of a step, with elementwise operations in order, from which a generator writes a kernel.

Shapes. A parameter's step is traced on ROWS rows with `width` elements. A row is one block of the coarsest
cut, if formats have blocks. ROWS is a prime, so it can be found in every shape:

    (ROWS, width)            elements
    (ROWS, width // 2)       bytes of two 4-bit codes
    (ROWS,), (ROWS, 1)       one value for each row, such as a scale
    (ROWS * k,), (ROWS, k, B), (ROWS * k, B)   k blocks in a row
    ()                       one value for each step or parameter

Inputs, by name:

    p, g        weights; their gradient, or the float32 update of a step before
    NAME        a state array, as `Graph.memory` names it
    index       int32, the low half of each element's row-major index
    first.SIZE  int32, the same of the first element of each block of SIZE elements
    number.i    float32, the i-th number of the step
    key.i       int32, the i-th column of the random words' keys. A kernel adds the high half of the index,
                times the golden ratio, to every k1 (contract W8).

Outputs, by name: state arrays, and p, or u for a float32 update if the step does not change the weights. In a
graph for norms, the outputs are norm.u and norm.p, float32 elements that are added (`SUMS`) but not stored.
Dtypes have their names in NumPy and ml_dtypes.

Operations round once each, integers wrap, and NaN passes through `minimum` and `maximum`:

    input const table                 name; number; list of numbers
    add sub mul div neg abs sign sqrt floor round minimum maximum where
    and or xor not shl shr lsr        `shr` of a signed integer copies the sign, `lsr` shifts in zeros
    eq ne lt le gt ge
    cast bitcast                      to the node's dtype
    amax any                          along `axes`, which are kept
    take                              table, index
    pack4 unpack4                     two codes in a byte, the earlier one in the low half
    view expand slice                 slice: axis, start, stop, step
    iota pad cat stack                traced, but no generator has a form

Operands are nodes or numbers. Numbers are floats if the operation is on floats, and are rounded to float32.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

ROWS = 7


class SumKind(NamedTuple):
    """A way to add the elements of a norm.

    Attributes:
        dtype: dtype of a piece's sum.
        words: number of words with this dtype in a parameter's total.
        has_units: whether each parameter has its own number for each norm, after the other numbers.
    """

    dtype: str
    words: int = 1
    has_units: bool = False


SUMS = {
    "squares": SumKind("float64"),
    "largest": SumKind("int64"),
    "integers": SumKind("int64", words=2, has_units=True),
}
"""Kinds of sums. They are the sum of squares, the largest magnitude as a pattern, and the sum of squares in
units of its last place, with its exponent field as the number and totals for the low 32 bits and the rest."""


def is_float(dtype: str) -> bool:
    """Whether a dtype is a floating-point dtype."""
    return dtype.startswith(("float", "bfloat"))


class NoGeneratedForm(Exception):
    """Raised for an operation without a kernel form. Its parameters take plain steps."""


@dataclasses.dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        op: the operation.
        args: nodes and numbers.
        shape: shape of the result.
        dtype: dtype of the result.
        axes: axes of a reduction.
        name: the result's variable in a kernel.
        exact: whether a cast to bfloat16 drops only bits that are 0.
    """

    op: str
    args: tuple
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...] = ()
    name: str = ""
    exact: bool = False

    @property
    def operands(self) -> "list[Node]":
        """The nodes among `args`."""
        return [x for x in self.args if isinstance(x, Node)]

    def __repr__(self) -> str:
        args = ", ".join(x.name if isinstance(x, Node) else repr(x) for x in self.args)
        axes = f" along {self.axes}" if self.axes else ""
        return f"{self.name}: {self.dtype}{list(self.shape)} = {self.op}({args}){axes}"


@dataclasses.dataclass(frozen=True)
class RowArray:
    """A parameter's array in memory.

    Attributes:
        name: name of an input or output in the graph.
        dtype: dtype of its entries.
        kind: "element", "packed" for two codes in a byte, or "scale" for one entry per block.
        shared: number of elements that share an entry.
    """

    name: str
    dtype: str
    kind: str = "element"
    shared: int = 1


@dataclasses.dataclass(eq=False)
class Graph:
    """The operations of a step.

    Attributes:
        nodes: nodes that an output reads, in the order of execution.
        outputs: outputs by name.
        memory: a parameter's arrays in a kernel's order, which is p, g, u if it is an output, and state
            arrays. Instead of u there may be the sums of squares for norm.u and norm.p.
        cuts: distinct block lengths, the coarsest first.
        width: number of elements in a row.
        numbers: number of hyperparameters and other numbers in a step.
        keys: number of columns in the random words' keys.
        second_keys: the columns that are a k1.
        sums: kind of sums for norms.
        late: numbers that another kernel on the device has written, with a row for each parameter. They are
            not among the words of the step.
    """

    nodes: list[Node]
    outputs: dict[str, Node]
    memory: tuple[RowArray, ...]
    cuts: tuple[int, ...]
    width: int
    numbers: int
    keys: int
    second_keys: frozenset[int]
    sums: str = "squares"
    late: range = range(0)

    def __post_init__(self) -> None:
        self.replace(self.nodes, self.outputs)

    def replace(self, nodes: Iterable[Node], outputs: dict[str, Node]) -> None:
        """Replace the nodes, without nodes that no output reads, and name the rest."""
        read: set[int] = set()
        waiting = list(outputs.values())
        while waiting:
            node = waiting.pop()
            if id(node) not in read:
                read.add(id(node))
                waiting += node.operands
        self.nodes, self.outputs = [node for node in nodes if id(node) in read], outputs
        for i, node in enumerate(self.nodes):
            node.name = f"t{i}"

    @property
    def inputs(self) -> dict[str, Node]:
        """Inputs in use, by name."""
        return {node.args[0]: node for node in self.nodes if node.op == "input"}

    @property
    def norms(self) -> list[str]:
        """Outputs that are added."""
        return [name for name in self.outputs if name.startswith("norm.")]

    def __repr__(self) -> str:
        lines = [repr(node) for node in self.nodes]
        lines += [f"return {name} = {node.name}" for name, node in self.outputs.items()]
        return "\n".join(lines)
