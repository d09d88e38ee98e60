"""The Triton source for a kernel, generated from a graph.

`triton_source` returns the text of a module with the function `step`, which updates every parameter in a
batch in one launch. The kernel reads these tables (`DeviceTables` in the package):

    chunks  int32 [programs, 2]       the parameter's row, and the number of the chunk
    rows    int64 [parameters, C]     addresses of `Graph.memory`, then `ROW_FIELDS`
    words   int32 [parameters, K + N] keys of random words, then the step's numbers as bit patterns
    late    float32 [parameters, L]   numbers that another kernel wrote, if the graph has any

One program updates one chunk. The text has two bodies. The fast body updates 16-byte aligned arrays, BLOCK
elements at a time, in whole vectors or whole blocks. The other body updates REST elements at a time, one for
each thread, at the end of an array, and in unaligned arrays, short blocks and windows that are not
contiguous.

In a graph for norms, `step` writes the sums of pieces, and both bodies process whole pieces. A second
function, `totals`, adds the sums for each parameter.

Every operation of the graph becomes one operation of Triton that rounds once, so the caller must compile with
`enable_fp_fusion=False`.
"""

from collections.abc import Iterator, Sequence

from halfstep.kernels.graph import SUMS, Graph, Node, is_float
from halfstep.kernels.triton_forms import TYPES, Forms, functions_of, operand
from halfstep.kernels.triton_norms import PIECE, functions_of_norms
from halfstep.random_words import GOLDEN_RATIO

ROW_FIELDS = ("elements", "first", "aligned", "run", "blocks", "window_run", "window_skip")
"""The fields of a row after its addresses.

aligned: 2 if the fast body may update the parameter, 1 if only its gradient is not aligned, else 0.
run, blocks: numbers of elements and blocks in a run, in which the last block may be short. The other fields
are described in `c_driver.FIELDS`.
"""
VECTOR = 16
"""Alignment for the fast body in bytes, and its smallest number of elements."""


def triton_source(graph: Graph, *, exact_by_ptx: bool = False) -> str:
    """Return the module for a kernel.

    Args:
        graph: graph for an elementwise step.
        exact_by_ptx: whether roots and quotients are PTX, as NVIDIA's devices need before Triton 3.6.

    Raises:
        NoGeneratedForm: if Triton cannot compute an operation or a constant with the graph's bits.
    """
    functions, kernel = functions_of(graph, exact_by_ptx), _Kernel(graph)
    if graph.norms:
        functions += functions_of_norms(graph.sums, kernel.sum_type)
    parts = ["import triton\nimport triton.language as tl", *functions, kernel.block(), kernel.step()]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


class _Kernel:
    """The two functions of a kernel's module."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.width, self.cut = graph, graph.width, bool(graph.cuts)
        self._forms = Forms(graph)
        self.kinds = {x.name: x.kind for x in graph.memory}
        self.scales = {x.name: self.width // x.shared for x in graph.memory if x.kind == "scale"}
        self.tables = [node.name for node in graph.nodes if node.op == "table"]
        self.keys = [f"key{i}" for i in range(graph.keys)]
        self.numbers = [f"number{i}" for i in range(graph.numbers)]
        self.given = [*self.keys, *self.numbers, *self.tables]
        self.place = ["row", "run", "blocks", "window_run", "window_skip"]
        self.sum_type = TYPES[SUMS[graph.sums].dtype]

    def block(self) -> str:
        """Return the function that updates some elements in a parameter."""
        pointers = [_pointer(x.name) for x in self.graph.memory]
        taken = [
            *pointers,
            *self.given,
            "index",
            "count",
            *self.place,
            "BLOCK: tl.constexpr",
            "REST: tl.constexpr",
        ]
        lines = [*(self._block_places() if self.cut else self._places()), *self._inputs()]
        lines += [
            f"{x.name} = {self._forms.form(x)}"
            for x in self.graph.nodes
            if x.op not in ("input", "const", "table")
        ]
        return _function("block", taken, [*lines, *self._outputs()])

    def _places(self) -> list[str]:
        """Return the elements' places if no format has blocks. In the rest, a thread has one element."""
        return [
            "local = tl.arange(0, BLOCK)",
            "mask = local < count",
            "if REST:",
            "    offs = row + local",
            f"    at = {_index('offs')}",
            "else:",
            "    offs = local",
            "    at = index.to(tl.int32) + offs",
        ]

    def _block_places(self) -> list[str]:
        """Return the places of elements, packed codes and scales. A row is one block in the coarsest cut."""
        width = self.width
        lines = [
            f"R: tl.constexpr = BLOCK // {width}",
            f"r, lane = tl.arange(0, R)[:, None], tl.arange(0, {width})[None, :]",
            "if REST:",
            "    of_run, of_block = (row + r) // blocks, (row + r) % blocks",
            f"    offs = of_run * run + of_block * {width} + lane",
            f"    mask = (r < count) & (of_block * {width} + lane < run)",
            f"    at = {_index('offs')}",
            "else:",
            f"    offs = r * {width} + lane",
            "    mask = (r < count) & (lane >= 0)",
            "    at = index.to(tl.int32) + offs",
        ]
        if "packed" in self.kinds.values():
            lines += [
                f"half = tl.arange(0, {width // 2})[None, :]",
                "if REST:",
                f"    offs_packed = of_run * ((run + 1) // 2) + of_block * {width // 2} + half",
                f"    mask_packed = (r < count) & (of_block * {width} + 2 * half < run)",
                "else:",
                f"    offs_packed = r * {width // 2} + half",
                "    mask_packed = (r < count) & (half >= 0)",
            ]
        for size in sorted(set(self.scales.values())):
            of = width // size
            lines += [
                f"offs_scale{size} = tl.arange(0, R * {size})",
                f"mask_scale{size} = offs_scale{size} < count * {size}",
                "if REST:  # a run has as many scales as it has blocks, and the last block may be short",
                f"    of_row = row + offs_scale{size} // {size}",
                f"    in_run = of_row % blocks * {size} + offs_scale{size} % {size}",
                f"    mask_scale{size} = mask_scale{size} & (in_run * {of} < run)",
                f"    offs_scale{size} = of_row // blocks * ((run + {of - 1}) // {of}) + in_run",
            ]
        return lines

    def _inputs(self) -> Iterator[str]:
        """Yield statements that load the graph's inputs."""
        for node in self.graph.nodes:
            name = node.args[0] if node.op == "input" else ""
            if not name:
                continue
            if name == "index":
                yield f"{node.name} = at"
            elif name.startswith("first."):
                yield from self._firsts(node, int(name.removeprefix("first.")))
            elif name.startswith(("key.", "number.")):
                yield f"{node.name} = {name.replace('.', '')}"
            else:
                zero = "0.0" if is_float(node.dtype) else "0"
                offs, mask = self._where(name)
                yield f"{node.name} = tl.load({_pointer(name)} + {offs}, mask={mask}, other={zero})"

    def _firsts(self, node: Node, size: int) -> list[str]:
        """Return statements that compute the first index in each block with `size` elements."""
        per_row = self.width // size
        return [
            f"b = tl.arange(0, R * {per_row})[:, None]",
            "if REST:",
            f"    b_row = row + b // {per_row}",
            f"    b_offs = b_row // blocks * run + b_row % blocks * {self.width} + b % {per_row} * {size}",
            f"    {node.name} = {_index('b_offs')}",
            "else:",
            f"    {node.name} = index.to(tl.int32) + b * {size}",
        ]

    def _outputs(self) -> Iterator[str]:
        """Yield the statements that store the results."""
        for name, node in self.graph.outputs.items():
            if name in self.graph.norms:  # its pointer is at the first piece
                unit = "0"
                if SUMS[self.graph.sums].has_units:
                    unit = self.numbers[self.graph.norms.index(name) - len(self.graph.norms)]
                value = operand(node, node)
                yield f"store_sums({_pointer(name)}, {value}, mask, {unit}, BLOCK // {PIECE})"
                continue
            offs, mask = self._where(name)
            value = operand(node, node)
            if name in self.scales and len(node.shape) > 1:
                value = f"tl.reshape({value}, [R * {self.scales[name]}])"
            yield f"tl.store({_pointer(name)} + {offs}, {value}, mask={mask})"

    def _where(self, name: str) -> tuple[str, str]:
        """Return the variables for an array's offsets and mask."""
        kind = self.kinds[name]
        suffix = {"element": "", "packed": "_packed", "scale": f"_scale{self.scales.get(name)}"}[kind]
        return f"offs{suffix}", f"mask{suffix}"

    def step(self) -> str:
        """Return the kernel, which reads the tables and updates one chunk."""
        columns, words = len(self.graph.memory), len(self.keys) + len(self.numbers)
        lines = [
            "program = tl.program_id(0).to(tl.int64)",
            "param = tl.load(chunks + program * 2).to(tl.int64)",
            "start = tl.load(chunks + program * 2 + 1).to(tl.int64) * CHUNK",
            f"entry = rows + param * {columns + len(ROW_FIELDS)}",
            *(f"{name} = tl.load(entry + {columns + i})" for i, name in enumerate(ROW_FIELDS)),
        ]
        # The alignment hint holds only for pointers that are made in the kernel itself.
        for i, x in enumerate(self.graph.memory):
            of = self.sum_type if x.name in self.graph.norms else TYPES[x.dtype]
            lines.append(f"{_pointer(x.name)} = tl.load(entry + {i}).to(tl.pointer_type({of}))")
        lines += self._start()
        lines += [f"word = words + param * {words}"] if words else []
        for i, name in enumerate(self.keys):
            lines.append(f"{name} = tl.load(word + {i})" + (" + high" if i in self.graph.second_keys else ""))
        late = self.graph.late
        for i, name in enumerate(self.numbers):
            place = f"word + {len(self.keys) + i}).to(tl.float32, bitcast=True)"
            lines.append(f"{name} = tl.load({_late(late, i) if i in late else place}")
        taken = [
            "chunks",
            "rows",
            "words",
            *self.tables,
            *(["late"] if late else []),
            "CHUNK",
            "BLOCK: tl.constexpr",
            "REST: tl.constexpr",
        ]
        return _function("step", taken, [*lines, *self._loops()])

    def _start(self) -> list[str]:
        """Return statements that find the chunk, and the high half of its indices (contract W8)."""
        golden = int(GOLDEN_RATIO) - (1 << 32)
        if not self.cut:
            return [
                "row, offset = start, start",
                "count = tl.minimum(elements - start, CHUNK).to(tl.int32)",
                f"fast = count // {VECTOR} * {VECTOR} * (aligned > 0).to(tl.int32)",
                f"high = ((first + offset) >> 32).to(tl.int32) * ({golden})",
            ]
        return [
            f"row = start // {self.width}",
            f"offset = row // blocks * run + row % blocks * {self.width}",
            f"count = tl.minimum(elements // run * blocks - row, CHUNK // {self.width}).to(tl.int32)",
            f"fast = tl.minimum((elements - offset) // {self.width}, count).to(tl.int32)",
            "fast = fast * (aligned > 0).to(tl.int32)",
            f"high = ((first + offset) >> 32).to(tl.int32) * ({golden})",
        ]

    def _loops(self) -> list[str]:
        """Return the loops over a chunk. At most two of them have elements."""
        unit = self.width if self.cut else 1
        here = "i" if unit == 1 else f"i * {unit}"

        def left(of: str) -> str:
            return f"{of} - i" if self.cut else f"tl.multiple_of({of} - i, {VECTOR})"

        whole = f"BLOCK // {unit}"
        return [
            *([f"fast = fast // ({whole}) * ({whole})"] if self.graph.norms else []),
            "vectors = fast * (aligned == 2).to(tl.int32)",
            f"for i in tl.range(0, vectors, BLOCK // {unit}):",
            f"    at = offset + {here}",
            "    " + self._call("at", left("vectors"), hinted=True),
            f"for i in tl.range(vectors, fast, BLOCK // {unit}):",
            f"    at = offset + {here}",
            "    " + self._call("at", left("fast"), hinted=False),
            f"for i in tl.range(fast, count, REST // {unit}):",
            "    " + self._rest_call(),
        ]

    def _call(self, at: str, count: str, *, hinted: bool) -> str:
        """Return a call to the fast body. `hinted` means that the gradient is aligned too."""
        pointers = []
        for x in self.graph.memory:
            if x.name in self.graph.norms:
                pointers.append(f"{_pointer(x.name)} + {at} // {PIECE}")
                continue
            if x.kind == "scale":
                pointers.append(f"{_pointer(x.name)} + {at} // {self.width} * {self.scales[x.name]}")
                continue
            moved = f"{_pointer(x.name)} + {at if x.kind == 'element' else at + ' // 2'}"
            pointers.append(f"tl.multiple_of({moved}, {VECTOR})" if hinted or x.name != "g" else moved)
        given = [*pointers, *self.given, f"first + {at}", count, "row + i", *self.place[1:], "BLOCK", "False"]
        return f"block({', '.join(given)})"

    def _rest_call(self) -> str:
        at = f"(row + i) * {self.width}" if self.cut else "(row + i)"
        pointers = [
            _pointer(x.name) + (f" + {at} // {PIECE}" if x.name in self.graph.norms else "")
            for x in self.graph.memory
        ]
        given = [*pointers, *self.given, "first", "count - i", "row + i", *self.place[1:], "REST", "True"]
        return f"block({', '.join(given)})"


def _function(name: str, taken: Sequence[str], lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"@triton.jit\ndef {name}({', '.join(taken)}):\n{body}"


def _pointer(name: str) -> str:
    """Return the variable for an array's address. A state array's name may have dots."""
    return "".join(c if c.isalnum() else "_" for c in name) + "_ptr"


def _late(late: range, i: int) -> str:
    return f"late + param * {len(late)} + {i - late.start})"


def _index(offs: str) -> str:
    """Return the low half of the row-major indices at local offsets."""
    return f"(index + {offs} + {offs} // window_run * window_skip).to(tl.int32)"
