"""Passes over a traced graph that shorten kernels and do not change any bit."""

import math
import struct
from collections.abc import Callable

from halfstep.kernels.graph import Graph, Node, NoGeneratedForm

_ELEMENTWISE = frozenset(
    "add sub mul div neg abs sign sqrt floor round minimum maximum where and or xor not shl shr lsr "
    "eq ne lt le gt ge cast bitcast".split()
)


def simplified(graph: Graph) -> Graph:
    """Return the graph in the form for generators. The nodes are changed in place."""
    for change in (_codes_in_pairs, _logical_shifts, _narrow_shifts, _firsts_of_blocks, _exact_casts):
        change(graph)
    return graph


def _replace(graph: Graph, becomes: Callable[[Node], Node | list[Node] | None]) -> None:
    """Replace each node by the result of `becomes`. None keeps it, and the last of several replaces it."""
    instead: dict[int, Node] = {}

    def new(x: Node | float) -> Node | float:
        while isinstance(x, Node) and id(x) in instead:
            x = instead[id(x)]
        return x

    nodes: list[Node] = []
    for node in graph.nodes:
        node.args = tuple(map(new, node.args))
        made = becomes(node)
        if made is None:
            nodes.append(node)
            continue
        made = made if isinstance(made, list) else [made]
        instead[id(node)] = made[-1]
        present = set(map(id, nodes))
        nodes += [x for x in made if id(x) not in present]
    graph.replace(nodes, {name: new(node) for name, node in graph.outputs.items()})  # type: ignore[misc]


def _codes_in_pairs(graph: Graph) -> None:
    """Merge packing and unpacking of 4-bit codes into one operation each, on arrays in their own shape."""

    def becomes(node: Node) -> Node | None:
        if node.op == "view" and node.shape == node.args[0].shape:
            return node.args[0]
        if node.op == "view" and node.args[0].op == "view" and node.shape == node.args[0].args[0].shape:
            return node.args[0].args[0]
        if node.op == "or" and (source := _source_of_pack(node)) is not None:
            source = source.args[0] if source.op == "view" else source
            return Node("pack4", (source,), (*source.shape[:-1], source.shape[-1] // 2), "uint8")
        if node.op == "stack" and len(node.args) == 2:
            low, high = node.args
            source = low.args[0]
            if (low.op, low.args[1:]) == ("and", (15,)) and (high.op, high.args) == ("shr", (source, 4)):
                source = source.args[0] if source.op == "view" else source
                return Node("unpack4", (source,), (*source.shape[:-1], 2 * source.shape[-1]), "uint8")
        return None

    _replace(graph, becomes)
    # Views of a replaced node that lead to the shape that it already has.
    _replace(
        graph, lambda node: node.args[0] if node.op == "view" and node.shape == node.args[0].shape else None
    )


def _source_of_pack(node: Node) -> Node | None:
    """Return x if a node is x[..., ::2] | x[..., 1::2] << 4."""
    low, high = node.args
    if not isinstance(high, Node) or high.op != "shl" or high.args[1] != 4 or not isinstance(low, Node):
        return None
    (high, _), places = high.args, []
    for part in (low, high):
        if not isinstance(part, Node) or part.op != "slice" or part.args[4] != 2:
            return None
        places.append(part.args[2])
    return low.args[0] if places == [0, 1] and low.args[0] is high.args[0] else None


def _logical_shifts(graph: Graph) -> None:
    """Merge a shift of int32 into one operation if the copied sign bits are masked out.

    A shift to the left before it, which cuts off bits above a field, becomes a mask after it. Processors run
    more masks than shifts at once.
    """

    def becomes(node: Node) -> Node | list[Node] | None:
        shift, mask = node.args if node.op == "and" else (None, None)
        if not isinstance(shift, Node) or shift.op != "shr" or shift.dtype != "int32":
            return None
        x, by = shift.args
        if not isinstance(by, int) or mask != (1 << (32 - by)) - 1:
            return None
        if x.op == "const":
            return Node("const", ((x.args[0] & 0xFFFFFFFF) >> by,), node.shape, node.dtype)
        up = x.args[1] if x.op == "shl" else None
        if not isinstance(up, int) or up > by:
            return Node("lsr", (x, by), node.shape, node.dtype)
        field = [Node("lsr", (x.args[0], by - up), node.shape, node.dtype)] if by > up else []
        return [*field, Node("and", (*(field or x.args[:1]), mask), node.shape, node.dtype)]

    _replace(graph, becomes)


def _narrow_shifts(graph: Graph) -> None:
    """Shift int32 without sign copies before a cast to int16, which keeps only the low bits."""

    def becomes(node: Node) -> list[Node] | None:
        right = node.args[0] if node.op == "cast" and node.dtype == "int16" else None
        if not isinstance(right, Node) or right.op != "shr" or right.args[1] != 16:
            return None
        left = right.args[0]
        if left.op != "shl" or left.dtype != "int32" or not 0 < left.args[1] <= 16:
            return None
        x, by = left.args
        low = x if by == 16 else Node("shr", (x, 16 - by), x.shape, x.dtype)
        return [low, Node("cast", (low,), node.shape, node.dtype)]

    _replace(graph, becomes)


def _firsts_of_blocks(graph: Graph) -> None:
    """Compute values at the first element of each block only from its index."""

    def becomes(node: Node) -> list[Node] | None:
        is_first = node.op == "slice" and node.args[1] == len(node.shape) - 1 and node.args[2:4] == (0, 1)
        return _at_first(node.args[0], node.shape, node.args[0].shape[-1]) if is_first else None

    _replace(graph, becomes)


def _at_first(source: Node, shape: tuple[int, ...], size: int) -> list[Node]:
    """Return the nodes that compute a function of the index for the first element of each block."""
    made: dict[int, Node] = {}
    order: list[Node] = []

    def visit(x: Node | float) -> Node | float:
        if not isinstance(x, Node) or not x.shape:
            return x
        if x.op == "view" and math.prod(x.shape) == math.prod(x.args[0].shape):
            return visit(x.args[0])
        if id(x) in made:
            return made[id(x)]
        if x.op == "input" and x.args[0] == "index":
            new = Node("input", (f"first.{size}",), shape, x.dtype)
        elif x.op in _ELEMENTWISE:
            new = Node(x.op, tuple(map(visit, x.args)), shape, x.dtype)
        else:
            raise NoGeneratedForm(f"the first element of each block, of {x.op}")
        made[id(x)] = new
        order.append(new)
        return new

    visit(source)
    return order


def _exact_casts(graph: Graph) -> None:
    """Mark casts to bfloat16 that drop only zeros, and leave out casts back to float32 after them."""

    def becomes(node: Node) -> Node | None:
        if node.op != "cast" or not isinstance(node.args[0], Node):
            return None
        (source,) = node.args
        if node.dtype == "bfloat16" and source.dtype == "float32":
            node.exact = _low_half_is_zero(source)
        return source.args[0] if node.dtype == "float32" and source.op == "cast" and source.exact else None

    _replace(graph, becomes)


def _low_half_is_zero(x: Node | float, depth: int = 8) -> bool:
    """Whether the low 16 bits of a pattern, or of a float32's pattern, are known to be 0."""
    if isinstance(x, (int, float)):
        pattern = x if isinstance(x, int) else int.from_bytes(struct.pack("<f", x), "little")
        return pattern & 0xFFFF == 0
    if not depth or x.op in ("input", "table"):
        return False
    known = [_low_half_is_zero(arg, depth - 1) for arg in x.args if isinstance(arg, (Node, int, float))]
    if x.op == "and":
        return any(known)
    if x.op in ("or", "xor", "bitcast", "const"):
        return all(known)
    if x.op in ("add", "sub", "minimum", "maximum") and x.dtype == "int32":
        return all(known)
    if x.op == "where":
        return all(known[1:])
    if x.op == "shl":
        return isinstance(x.args[1], int) and x.args[1] >= 16
    return x.op == "cast" and x.dtype == "float32" and x.args[0].dtype == "bfloat16"
