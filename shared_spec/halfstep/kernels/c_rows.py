"""The order of operations in a row of a C kernel.

Without blocks a row has any length, and its loop runs over a multiple of LANES elements. With blocks a row is
one block of the coarsest cut, and a value that depends on a maximum is computed in a later loop than the
maximum. Values for a later loop are kept on the stack, or computed again if that takes few operations.
"""

import math
from collections.abc import Sequence

from halfstep.kernels.c_head import TYPES
from halfstep.kernels.graph import ROWS, Graph, Node, NoGeneratedForm

ELEMENT, BYTE, SCALAR = "element", "byte", "scalar"
_AGAIN = 6
"""Largest number of operations for an element that is computed again after a maximum instead of kept."""


class Rows:
    """The order of a row's operations.

    Attributes:
        level: number of values per row for each node, or `ELEMENT`, `BYTE` or `SCALAR`.
        phase: number of maxima over the row that each node needs.
        late: outputs that are stored last, because a later loop reads the array that they replace.
        kept: elements in an array on the stack.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.width, self.cut = graph, graph.width, bool(graph.cuts)
        self.nodes = [node for node in graph.nodes if node.op not in ("view", "expand")]
        if unknown := {node.dtype for node in self.nodes} - set(TYPES):
            raise NoGeneratedForm(", ".join(map(str, unknown)))
        self.args = {
            node: tuple(base(x) if isinstance(x, Node) else x for x in node.args) for node in self.nodes
        }
        self.outputs = {name: base(node) for name, node in graph.outputs.items()}
        self.level = {node: self._level_of(node) for node in self.nodes}
        self.phase: dict[Node, int] = {}
        for node in self.nodes:
            self.phase[node] = self._phase_of(node)
        self._costs: dict[Node, int] = {}
        self.kept = self._kept()
        self.late = self._late()
        self.kept |= set(self.late.values())

    def operands(self, node: Node) -> list[Node]:
        """Return the nodes that a node reads."""
        return [x for x in self.args[node] if isinstance(x, Node)]

    def _level_of(self, node: Node) -> str | int:
        if node.shape == () or node.op == "table":
            return SCALAR
        size = math.prod(node.shape) // ROWS
        is_packed = node.op == "pack4" or any(
            x.op == "unpack4" and self.args[x][0] is node for x in self.nodes
        )
        if is_packed or size not in (self.width, *self._cuts()):
            if size * 2 != self.width:
                raise NoGeneratedForm(f"{node.op} of {size} values of a row of {self.width}")
            return BYTE
        return ELEMENT if size == self.width else size

    def _cuts(self) -> list[int]:
        """Return the number of blocks per row for each cut."""
        return [self.width // size for size in self.graph.cuts]

    def _phase_of(self, node: Node) -> int:
        phases, level = [0], self.level[node]
        for x in self.operands(node):
            of = self.level[x]
            if of == SCALAR or node.op == "slice":  # a slice computes its element anew
                continue
            waits = of in (ELEMENT, BYTE) and level not in (ELEMENT, BYTE)
            phases.append(self.phase[x] + waits)
        return max(phases)

    def _late(self) -> dict[str, Node]:
        """Return the outputs that are stored last, by name."""
        read_until: dict[str, int] = {}
        for phase in range(max(self.phase.values()) + 1):
            for x in self.needed(self.roots(phase), phase):
                if x.op == "input":
                    read_until[x.args[0]] = phase
        ends = {name: x for name, x in self.outputs.items() if self.level[x] == ELEMENT}
        return {name: x for name, x in ends.items() if self.phase[x] < read_until.get(name, 0)}

    def roots(self, phase: int) -> list[Node]:
        """Return the elements that the loop of a phase must compute."""
        kept = [x for x in self.in_order(self.kept) if self.phase[x] == phase and x.op != "unpack4"]
        ends = [x for x in self.outputs.values() if self.level[x] == ELEMENT and self.phase[x] == phase]
        return [*kept, *ends, *(self.operands(x)[0] for x in self.maxima_after(phase))]

    def maxima_after(self, phase: int) -> list[Node]:
        """Return the maxima over a whole row that the loop of a phase computes."""
        maxima = [x for x in self.nodes if x.op in ("amax", "any") and self.level[x] == 1]
        return [x for x in maxima if self.phase[x] == phase + 1]

    def _kept(self) -> set[Node]:
        """Return the elements that another loop reads, if computing them again takes long."""
        kept = {node for node in self.nodes if node.op == "unpack4"}
        for node in self.nodes:
            for x in self.operands(node):
                if self.level[x] != ELEMENT or x.op == "input":
                    continue
                later = self.level[node] in (ELEMENT, BYTE) and self.phase[node] > self.phase[x]
                in_parts = node.op in ("amax", "any") and self.level[node] != 1
                if node.op == "pack4" or in_parts or (later and self._cost(x) > _AGAIN):
                    kept.add(x)
        return kept

    def _cost(self, node: Node) -> int:
        """Return the number of operations for an element, from its inputs, block values and scalars."""
        if node not in self._costs:
            free = node.op == "input" or self.level[node] != ELEMENT
            self._costs[node] = 0 if free else 1 + sum(map(self._cost, self.operands(node)))
        return self._costs[node]

    def in_order(self, nodes: set[Node]) -> list[Node]:
        """Return nodes in the order of execution."""
        return [node for node in self.nodes if node in nodes]

    def is_at_hand(self, x: Node, phase: int) -> bool:
        """Whether an element can be read from the stack."""
        return x in self.kept and (self.phase[x] < phase or x.op == "unpack4")

    def needed(self, roots: Sequence[Node], phase: int) -> list[Node]:
        """Return the elements that a loop computes or reads, in order."""
        needed, waiting = set(), [x for x in roots if self.level[x] == ELEMENT]
        while waiting:
            x = waiting.pop()
            if x in needed:
                continue
            needed.add(x)
            if self.is_at_hand(x, phase) or (x.op == "mul" and is_index(self.args[x][0])):
                continue
            waiting += [y for y in self.operands(x) if self.level[y] == ELEMENT]
        return self.in_order(needed)


def base(x: Node) -> Node:
    """Return a node without its views, which do not change the row-major order."""
    while x.op in ("view", "expand"):
        x = x.args[0]
    return x


def is_index(x: Node | float) -> bool:
    """Whether an operand is the index of an element."""
    return isinstance(x, Node) and x.op == "input" and x.args[0] == "index"
