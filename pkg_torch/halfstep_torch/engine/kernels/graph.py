"""The graph of a stage: elementwise operations in order, from which a generator writes a kernel.

Shapes. The stage is traced on ROWS rows of `width` elements. A row is one block of the coarsest cut, if
formats have blocks. ROWS is a prime, so it can be found in every shape:

    (ROWS, width)            elements
    (ROWS, width // 2)       bytes of two 4-bit codes
    (ROWS,), (ROWS, 1)       one value for each row, such as a scale
    (ROWS * k,), (ROWS, k, B), (ROWS * k, B)   k blocks in a row
    ()                       one value for each step or parameter

Inputs, by name:

    p, g        weights; their gradient, or the float32 update of the stage before
    NAME        a state array, as `stage.arrays` names it
    index       int32, the low half of each element's row-major index
    first.SIZE  int32, the same of the first element of each block of SIZE elements
    number.i    float32, the i-th number of the step
    key.i       int32, the i-th column of the keys of random words. A kernel adds the high half of the index,
                times the golden ratio, to every k1 (contract W8).

Outputs, by name: p, or u for the float32 update of a stage that does not change the weights, and state
arrays.

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

import torch

from halfstep_torch.engine.stage import Stage

ROWS = 7


class NoGeneratedForm(Exception):
    """An operation for which there is no kernel: its parameters take plain steps."""


@dataclasses.dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        op: the operation.
        args: nodes and numbers.
        shape: of the result.
        dtype: of the result.
        axes: of a reduction.
        name: the variable of the result in a kernel.
        exact: whether a cast to bfloat16 drops only bits that are 0.
    """

    op: str
    args: tuple
    shape: tuple[int, ...]
    dtype: torch.dtype
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
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {dtype}{list(self.shape)} = {self.op}({args}){axes}"


@dataclasses.dataclass(eq=False)
class Graph:
    """The operations of a stage.

    Attributes:
        nodes: in the order of execution. Only nodes that an output reads.
        outputs: by name.
        stage: that was traced.
        grad_dtype: of the input g.
        width: elements of a row.
        numbers: how many numbers a step has.
        keys: how many columns the keys of random words have.
    """

    nodes: list[Node]
    outputs: dict[str, Node]
    stage: Stage
    grad_dtype: torch.dtype
    width: int
    numbers: int
    keys: int

    def __post_init__(self) -> None:
        self.replace(self.nodes, self.outputs)

    def replace(self, nodes: Iterable[Node], outputs: dict[str, Node]) -> None:
        """Replace the nodes; leave out nodes that no output reads, and name the others."""
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
        """The inputs that are read, by name."""
        return {node.args[0]: node for node in self.nodes if node.op == "input"}

    @property
    def second_keys(self) -> set[int]:
        """The columns of keys that are a k1."""
        seconds, place = set(), 0
        for roles in self.stage.roles:
            seconds |= set(range(place + 1, place + 1 + len(roles)))
            place += 1 + len(roles)
        return seconds

    def __repr__(self) -> str:
        lines = [repr(node) for node in self.nodes]
        lines += [f"return {name} = {node.name}" for name, node in self.outputs.items()]
        return "\n".join(lines)
