"""The Triton module of what updates are multiplied by: `scale` adds up norms, and computes it from them.

Its launch stands between that of norms and that of the step: it reads the tables of the first, and writes a
table of numbers that the second one reads (`Graph.late`).
"""

from halfstep.kernels.graph import Graph
from halfstep.kernels.triton_forms import Forms, functions_of, operand
from halfstep.kernels.triton_norms import BY_HALVES, PIECE

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


def triton_scale(graph: Graph, norms: int, *, exact_by_ptx: bool = False) -> str:
    """Return the module of a graph of single numbers.

    Args:
        graph: its inputs are norm.k, moved.k (the norm of 2^-64 times the array) and number.i.
        norms: how many a parameter has.
        exact_by_ptx: as of `triton_source`.

    Raises:
        NoGeneratedForm: for an operation that Triton cannot compute with the graph's bits.
    """
    forms = Forms(graph)
    lines = [
        "param = tl.program_id(0).to(tl.int64)",
        "entry, word = rows + param * COLUMNS, words + param * WORDS + FIRST",
    ]
    for k in range(norms):
        lines += [
            f"root{k} = tl.sqrt(total(entry, {2 + k}, ELEMENTS))",
            f"norm{k} = root{k}.to(tl.float32)",
            f"moved{k} = (root{k} * tl.full([], {2.0**-64}, tl.float64)).to(tl.float32)",
        ]
    for node in graph.nodes:
        if node.op == "input":
            kind, i = node.args[0].split(".")
            load = f"tl.load(word + {i}).to(tl.float32, bitcast=True)"
            lines.append(f"{node.name} = {load if kind == 'number' else kind + i}")
        elif node.op != "const":
            lines.append(f"{node.name} = {forms.form(node)}")
    for i, node in enumerate(graph.outputs.values()):
        lines.append(f"tl.store(made + param * {len(graph.outputs)} + {i}, {operand(node, node)})")
    body = "\n".join(f"    {line}" for line in lines)
    step = f"@triton.jit\ndef scale(rows, words, made, COLUMNS, ELEMENTS, WORDS, FIRST):\n{body}"
    parts = ["import triton\nimport triton.language as tl", *functions_of(graph, exact_by_ptx)]
    return "\n\n\n".join(part.strip("\n") for part in (*parts, BY_HALVES, _TOTAL, step)) + "\n"
