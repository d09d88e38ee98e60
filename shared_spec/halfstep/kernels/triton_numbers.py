"""The Triton source for the launch before a step, which counts and computes the step's words and rows.

So the host computes no part of a step, and a CUDA graph can replay it. The graph for the words is traced from
the host's own functions for them. Its rows are parameters, one for each lane:

    count                  int64, after its increment
    leaf.i, high.i, low.i  int32, the leaf and the seed for the i-th stream of random words
    number.i               float32 and the same for all parameters, the i-th hyperparameter
    coming                 float32, 1, 2, ... up to `COMING`

The function `ahead` reads and writes these tables:

    given    int64, in pinned host memory: whether the step is valid, addresses of hyperparameters on the
             device (else 0), patterns of the other hyperparameters, addresses of gradients. An invalid step
             writes no arrays, because their memory may have other owners.
    rows     int64 [parameters, C], for the step's kernel: the gradient, its alignment, and no elements if the
             step is invalid
    words    int32 [parameters, K + N], for the step's kernel
    counts   int64, the address of each count
    leaves   int32 [parameters, 3 S]
    fast     int32, 1 for parameters with aligned weights and state
"""

from halfstep.kernels.graph import Graph, Node
from halfstep.kernels.triton_forms import TYPES, Forms, functions_of, operand
from halfstep.kernels.triton_source import ROW_FIELDS, VECTOR

COMING = 128
"""Largest number of coming steps that are read."""


def triton_numbers(
    graph: Graph, *, arrays: int, streams: int, numbers: int, last_step: int, exact_by_ptx: bool
) -> str:
    """Return the module with `ahead`.

    Args:
        graph: graph for a parameter's words, in order, with keys as int32 and numbers as float32.
        arrays: number of addresses in a row of the step's kernel. The second is the gradient's address.
        streams: number of random word streams.
        numbers: number of hyperparameters.
        last_step: largest step count (contract W5).
        exact_by_ptx: as in `triton_source`.

    Raises:
        NoGeneratedForm: if Triton cannot compute an operation or a constant with the graph's bits.
    """
    words, columns = len(graph.outputs), arrays + len(ROW_FIELDS)
    aligned, elements = (arrays + ROW_FIELDS.index(name) for name in ("aligned", "elements"))
    lines = [
        "i = (tl.program_id(0) * R + tl.arange(0, R))[:, None]",
        "here = i < parameters",
        "valid = tl.load(given)",
        f"address = tl.load(given + {1 + 2 * numbers} + i, mask=here, other=0)",
        f"row = rows + i.to(tl.int64) * {columns}",
        "tl.store(row + 1, address, mask=here)",
        "is_fast = tl.load(fast + i, mask=here, other=0).to(tl.int64)",
        f"tl.store(row + {aligned}, is_fast * (2 - (address % {VECTOR} != 0).to(tl.int64)), mask=here)",
        f"tl.store(row + {elements}, address * 0, mask=here & (valid == 0))",
        "here = here & (valid != 0)",
        "counter = tl.load(counts + i, mask=here, other=0).to(tl.pointer_type(tl.int64))",
        f"count = tl.minimum(tl.load(counter, mask=here, other=0) + 1, {last_step})",
        "tl.store(counter, count, mask=here)",
        *(line for node in graph.nodes for line in _statements(node, graph, streams, numbers)),
        f"word = words + i * {words}",
    ]
    lines += [f"tl.store(word + {i}, {_bits(x)}, mask=here)" for i, x in enumerate(graph.outputs.values())]
    tables = "given, rows, words, counts, leaves, fast, parameters"
    body = "\n".join(f"    {line}" for line in lines)
    kernel = f"@triton.jit\ndef ahead({tables}, R: tl.constexpr):\n{body}"
    parts = ["import triton\nimport triton.language as tl", *functions_of(graph, exact_by_ptx), kernel]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _statements(node: Node, graph: Graph, streams: int, numbers: int) -> list[str]:
    """Return the statements for an operation."""
    if node.op == "const":
        return []
    if node.op == "input":
        return _loaded(node.name, node.args[0], streams, numbers)
    if node.op == "slice":  # every second number, from `halves`
        source, axis, start, _, step = node.args
        assert (axis, step) == (1, 2)
        pairs = f"tl.split(tl.reshape({source.name}, [R, {node.shape[1]}, 2]))"
        both = f"{node.name}_0, {node.name}_1 = {pairs}"
        return [both, f"{node.name} = {node.name}_{start}"]
    return [f"{node.name} = {Forms(graph).form(node)}"]


def _bits(node: Node) -> str:
    """Return a result's bit patterns for each parameter."""
    value = f"tl.broadcast_to({node.name}, [R, 1])"
    if node.op == "const":
        value = f"tl.full([R, 1], {operand(node, node)}, {TYPES[node.dtype]})"
    return value if node.dtype == "int32" else f"{value}.to(tl.int32, bitcast=True)"


def _loaded(variable: str, name: str, streams: int, numbers: int) -> list[str]:
    kind, _, place = name.partition(".")
    if kind == "count":
        return [f"{variable} = count"]
    if kind == "coming":
        return [
            f"ahead_by = tl.broadcast_to((tl.arange(0, {COMING}) + 1)[None, :], [R, {COMING}])",
            f"{variable} = ahead_by.to(tl.float32)",
        ]
    if kind == "number":
        return [
            f"at = tl.load(given + {1 + int(place)})",
            f"pattern = tl.load(given + {1 + numbers + int(place)}).to(tl.int32)",
            "there = tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=0.0)",
            f"{variable} = tl.where(at != 0, there, pattern.to(tl.float32, bitcast=True))",
        ]
    column = 3 * int(place) + ("leaf", "high", "low").index(kind)
    return [f"{variable} = tl.load(leaves + i * {3 * streams} + {column}, mask=here, other=0)"]
