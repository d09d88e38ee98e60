"""Triton modules that compute factors for updates from the pieces of norms that an earlier launch wrote.

`scale` computes a factor for each parameter, and `measure` one for all parameters. Each reads the tables from
the launch for norms, and writes a table with numbers for the step's kernel (`Graph.late`).
"""

from collections.abc import Iterator, Sequence

from halfstep.kernels.graph import Graph
from halfstep.kernels.triton_forms import Forms, functions_of, operand
from halfstep.kernels.triton_norms import BY_HALVES, OF_PIECES, PIECE

_TOTAL = f"""
@triton.jit
def total(entry, k, ELEMENTS):
    sums = tl.load(entry + k).to(tl.pointer_type(tl.float64))
    count = (tl.load(entry + ELEMENTS) + {PIECE - 1}) // {PIECE}
    lanes = tl.arange(0, {PIECE})
    added = tl.full([{PIECE}], 0.0, tl.float64)
    for i in tl.range(0, count, {PIECE}):
        added += tl.load(sums + i + lanes, mask=i + lanes < count, other=0.0)
    return tl.sum(by_halves(tl.reshape(added, [1, {PIECE}]), 1), axis=0)
"""


# The norm over all norms, which other programs have stored.
_NORM_OF = f"""
@triton.jit
def squares_of(x, P: tl.constexpr):
    b = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
{OF_PIECES["squares"].strip(chr(10))}
    return total


@triton.jit
def norm_of(parts, count):
    lanes = tl.arange(0, {PIECE})
    added = tl.full([{PIECE}], 0.0, tl.float64)
    for i in tl.range(0, count, {PIECE}):
        x = tl.load(parts + 2 * (i + lanes), mask=i + lanes < count, other=0.0, volatile=True)
        of_piece = tl.sum(squares_of(tl.reshape(x, [1, {PIECE}]), 1), axis=0)
        added = tl.where(lanes == i // {PIECE} % {PIECE}, added + of_piece, added)
    return tl.sqrt(tl.sum(by_halves(tl.reshape(added, [1, {PIECE}]), 1), axis=0)).to(tl.float32)
"""


def triton_scale(graph: Graph, norms: int, *, exact_by_ptx: bool = False) -> str:
    """Return the module for a graph on single numbers, which `scale` computes for each parameter.

    Args:
        graph: a graph with the inputs norm.k, moved.k (the norm of 2^-64 times the array) and number.i.
        norms: number of norms per parameter.
        exact_by_ptx: as in `triton_source`.

    Raises:
        NoGeneratedForm: if Triton cannot compute an operation with the graph's bits.
    """
    lines = [
        "param = tl.program_id(0).to(tl.int64)",
        "entry, word = rows + param * COLUMNS, words + param * WORDS + FIRST",
        *(line for k in range(norms) for line in _norms(k, "entry")),
        *_computed(graph),
    ]
    for i, node in enumerate(graph.outputs.values()):
        lines.append(f"tl.store(made + param * {len(graph.outputs)} + {i}, {operand(node, node)})")
    head = "def scale(rows, words, made, COLUMNS, ELEMENTS, WORDS, FIRST):"
    return _module([*functions_of(graph, exact_by_ptx), BY_HALVES, _TOTAL], head, lines)


def triton_measure(graph: Graph, *, exact_by_ptx: bool = False) -> str:
    """Return the module for a graph on single numbers, which `measure` computes once for all rows.

    The last program computes it, from the norms that the other programs stored in `parts`. `count` is 0
    before and after a launch.

    Args:
        graph: a graph with the inputs norm.0 and moved.0, for all arrays together.
        exact_by_ptx: as in `triton_source`.

    Raises:
        NoGeneratedForm: if Triton cannot compute an operation with the graph's bits.
    """
    last = [
        "norm0, moved0 = norm_of(parts, params), norm_of(parts + 1, params)",
        *_computed(graph),
        f"lanes = tl.arange(0, {PIECE})",
        f"for i in tl.range(0, params, {PIECE}):",
    ]
    for i, node in enumerate(graph.outputs.values()):
        place, value = f"made + (i + lanes) * {len(graph.outputs)} + {i}", operand(node, node)
        last.append(f"    tl.store({place}, {value}, mask=i + lanes < params)")
    lines = [
        "param, params = tl.program_id(0).to(tl.int64), tl.num_programs(0)",
        *_norms(0, "rows + param * COLUMNS"),
        "tl.store(parts + 2 * param, norm0)",
        "tl.store(parts + 2 * param + 1, moved0)",
        "tl.debug_barrier()",
        "if tl.atomic_add(count, 1) == params - 1:",
        *(f"    {line}" for line in (*last, "tl.store(count, 0)")),
    ]
    head = "def measure(rows, parts, made, count, COLUMNS, ELEMENTS):"
    functions = [*functions_of(graph, exact_by_ptx), BY_HALVES, _TOTAL, _NORM_OF]
    return _module(functions, head, lines)


def _norms(k: int, entry: str) -> list[str]:
    """Return statements that add a parameter's k-th norm."""
    return [
        f"root{k} = tl.sqrt(total({entry}, {2 + k}, ELEMENTS))",
        f"norm{k} = root{k}.to(tl.float32)",
        f"moved{k} = (root{k} * tl.full([], {2.0**-64}, tl.float64)).to(tl.float32)",
    ]


def _computed(graph: Graph) -> Iterator[str]:
    """Yield the statements for a graph."""
    forms = Forms(graph)
    for node in graph.nodes:
        if node.op == "input":
            kind, i = node.args[0].split(".")
            load = f"tl.load(word + {i}).to(tl.float32, bitcast=True)"
            yield f"{node.name} = {load if kind == 'number' else kind + i}"
        elif node.op != "const":
            yield f"{node.name} = {forms.form(node)}"


def _module(functions: Sequence[str], head: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    parts = ["import triton\nimport triton.language as tl", *functions, f"@triton.jit\n{head}\n{body}"]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
