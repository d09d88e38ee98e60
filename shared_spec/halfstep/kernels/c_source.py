"""The C source for a kernel, generated from a graph.

`c_source` returns a translation unit with the function `step`, which updates all parameters in a table. The
generated function `row` updates elements that are contiguous in memory and in the whole array. The driver
(`c_driver.py`) divides the table into rows.

The compiler vectorizes every loop over elements.
"""

from collections.abc import Callable, Iterator, Sequence

from halfstep.kernels.c_driver import LANES, c_driver, variable
from halfstep.kernels.c_forms import dtype_of_number, form, number
from halfstep.kernels.c_head import HEAD, TYPES
from halfstep.kernels.c_rows import ELEMENT, SCALAR, Rows, is_index
from halfstep.kernels.graph import Graph, Node, NoGeneratedForm

Reference = Callable[[Node | float, Node], str]


def c_source(graph: Graph) -> str:
    """Return the translation unit for a kernel.

    Raises:
        NoGeneratedForm: if an operation or a dtype has no form in C.
    """
    row = _Row(graph)
    parts = [HEAD, *row.tables(), row.function(), c_driver(graph, row.arrays(), row.scalars())]
    return "\n".join(part.strip("\n") for part in parts) + "\n"


class _Row(Rows):
    """The function that updates one row."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._spread_already: set[Node] = set()

    # The parts of the translation unit.

    def tables(self) -> list[str]:
        """Return the constants for code tables."""
        found = [node for node in self.nodes if node.op == "table"]
        return [
            f"static const float {x.name}[] = {{{', '.join(number(v, 'float32') for v in x.args[0])}}};"
            for x in found
        ]

    def arrays(self) -> list[tuple[str, str, int]]:
        """Return a row's arrays, each with name, type, and the number of elements that share an entry."""
        return [(x.name, TYPES[x.dtype], x.shared) for x in self.graph.memory]

    def scalars(self) -> list[Node]:
        """Return the inputs with one value per parameter."""
        return [node for node in self.nodes if node.op == "input" and node.shape == ()]

    def function(self) -> str:
        """Return the function `row`."""
        taken = [
            f"{'' if name in self.outputs else 'const '}{of} *restrict {variable(name)}"
            for name, of, _ in self.arrays()
        ]
        taken += ["i64 n", "u32 first", *(f"const {TYPES[x.dtype]} {_name(x)}" for x in self.scalars())]
        lines = ["const i32 zero = halfstep_zero; (void)zero; (void)n; (void)first;"]
        if not self.cut:
            lines += [f"n &= -{LANES};", "if (n <= 0) return;"]
        lines += [
            f"const {TYPES[x.dtype]} {x.name} = {self._form(x, self._in_row)};"
            for x in self._computed_scalars()
        ]
        lines += [
            f"{_stored(x)} kept_{x.name}[{self.width}] __attribute__((aligned(64)));"
            for x in self.in_order(self.kept)
        ]
        for phase in range(max(self.phase.values()) + 1):
            for node in self.nodes:
                if self.phase[node] == phase and isinstance(self.level[node], int):
                    lines += self._of_blocks(node)
            lines += self._loop(phase)
        lines += self._stores()
        body = "\n".join(f"  {line}" for line in lines)
        return f"static __attribute__((noinline)) void row({', '.join(taken)}) {{\n{body}\n}}"

    def _computed_scalars(self) -> list[Node]:
        return [x for x in self.nodes if x.shape == () and x.op not in ("input", "const")]

    def _type(self, node: Node) -> str:
        return TYPES[node.dtype]

    # Block values.

    def _of_blocks(self, node: Node) -> list[str]:
        """Return statements that compute block values in a row."""
        count, of = self.level[node], self._type(node)
        assert isinstance(count, int)
        if node.op in ("amax", "any"):
            return self._maxima(node, count) if count > 1 else []  # of one block: made in the loop before
        if node.op == "input" and node.args[0].startswith("first."):
            value = f"(i32)(first + (u32)(j * {self.width // count}))"
        elif node.op == "input":
            value = f"{variable(node.args[0])}[j]"
        else:
            value = self._form(node, lambda x, by: self._in_block(x, by, count))
        return [f"{of} {node.name}[{count}];", f"for (i32 j = 0; j < {count}; j++) {node.name}[j] = {value};"]

    def _maxima(self, node: Node, count: int) -> list[str]:
        (x,), size = self.operands(node), self.width // count
        if node.op != "amax" or x.dtype != "float32":
            raise NoGeneratedForm(f"{node.op} of {x.dtype} over blocks within a row")
        return [
            f"float {node.name}[{count}];",
            f"for (i32 j = 0; j < {count}; j++) {{",
            "  i32 most = 0;",
            f"  for (i32 i = 0; i < {size}; i++) most = larger(most, bits(kept_{x.name}[j * {size} + i]));",
            f"  {node.name}[j] = real(most);",
            "}",
        ]

    def _in_block(self, x: Node | float, by: Node, count: int) -> str:
        """Return the expression for a value in block j, with `count` blocks."""
        if not isinstance(x, Node) or self.level[x] == SCALAR:
            return self._in_row(x, by)
        of = self.level[x]
        if not isinstance(of, int):
            raise NoGeneratedForm(f"{by.op} of a block, of single elements")
        return f"{x.name}[j]" if of == count else f"{x.name}[j * {of} / {count}]"

    def _in_row(self, x: Node | float, by: Node) -> str:
        """Return the expression for a number, or for a value with one instance per row."""
        if not isinstance(x, Node):
            return number(x, dtype_of_number(by))
        return number(x.args[0], x.dtype) if x.op == "const" else _name(x)

    # Loops over elements.

    def _loop(self, phase: int) -> list[str]:
        """Return the loop over the elements in a phase."""
        ends = {
            name: x
            for name, x in self.outputs.items()
            if self.level[x] == ELEMENT and self.phase[x] == phase and name not in self.late
        }
        kept = [x for x in self.in_order(self.kept) if self.phase[x] == phase and x.op != "unpack4"]
        maxima, roots = self.maxima_after(phase), self.roots(phase)
        lines = [
            line
            for x in self.in_order(self.kept)
            if x.op == "unpack4" and self.phase[x] == phase
            for line in self._unpacked(x)
        ]
        if not roots:
            return lines
        todo = self.needed(roots, phase)
        spread = self._spread(todo)
        head: list[str] = []
        body: list[str] = []
        for x in todo:
            if self.is_at_hand(x, phase):
                body.append(f"const {self._type(x)} {x.name} = {_loaded(x, f'kept_{x.name}[i]')};")
            elif x.op == "mul" and is_index(self.args[x][0]):
                by = self._in_row(self.args[x][1], x)
                head.append(f"u32 run_{x.name} = first * (u32){by};")
                body.append(f"const i32 {x.name} = (i32)run_{x.name}; run_{x.name} += (u32){by};")
            elif is_index(x):
                body.append(f"const i32 {x.name} = (i32)(first + (u32)i);")
            elif x.op == "input":
                body.append(f"const {self._type(x)} {x.name} = {variable(x.args[0])}[i];")
            else:
                body.append(f"const {self._type(x)} {x.name} = {self._form(x, self._in_element)};")
        body += [f"kept_{x.name}[i] = {x.name};" for x in kept]
        body += [f"{variable(name)}[i] = {self._in_element(x, x)};" for name, x in ends.items()]
        for x in maxima:
            (of,) = self.operands(x)
            pattern = f"bits({of.name})" if x.op == "amax" else f"(i32){of.name}"
            head.append(f"i32 most_{x.name} = 0;")
            body.append(f"most_{x.name} = larger(most_{x.name}, {pattern});")
        count = self.width if self.cut else "n"
        loop = [
            "#pragma GCC ivdep",
            f"for (i32 i = 0; i < {count}; i++) {{",
            *(f"  {line}" for line in body),
            "}",
        ]
        for x in maxima:
            value = f"real(most_{x.name})" if x.op == "amax" else f"most_{x.name} != 0"
            loop.append(f"const {self._type(x)} {x.name}[1] = {{{value}}};")
        return [*lines, *spread, *head, *loop]

    def _spread(self, todo: Sequence[Node]) -> list[str]:
        """Return loops that copy block values to each element, because nested loops are not vectorized."""
        lines = []
        for x in (y for node in todo for y in self.operands(node)):
            count = self.level[x]
            if not isinstance(count, int) or count == 1 or x in self._spread_already:
                continue
            self._spread_already.add(x)
            size = self.width // count
            lines += [
                f"{_stored(x)} of_{x.name}[{self.width}];",
                f"for (i32 j = 0; j < {count}; j++) for (i32 i = 0; i < {size}; i++) "
                f"of_{x.name}[j * {size} + i] = {x.name}[j];",
            ]
        return lines

    def _in_element(self, x: Node | float, by: Node) -> str:
        """Return the expression for a value at element i."""
        if not isinstance(x, Node) or self.level[x] == SCALAR:
            return self._in_row(x, by)
        count = self.level[x]
        if count == 1:
            return f"{x.name}[0]"
        if isinstance(count, int):
            return _loaded(x, f"of_{x.name}[i]")
        return x.name

    def _unpacked(self, node: Node) -> list[str]:
        (source,) = self.operands(node)
        half = self.width // 2
        return [
            f"for (i32 i = 0; i < {half}; i++) {{",
            f"  const u8 pair = {variable(source.args[0])}[i];",
            f"  kept_{node.name}[2 * i] = pair & 15; kept_{node.name}[2 * i + 1] = pair >> 4;",
            "}",
        ]

    def _form(self, node: Node, reference: Reference) -> str:
        """Return the expression for an operation, given a function for its operands."""
        args = self.args[node]
        return form(node, args, [reference(x, node) for x in args])

    def _stores(self) -> Iterator[str]:
        """Yield statements that store block values, packed codes, and late outputs."""
        for name, node in self.late.items():
            yield f"for (i32 i = 0; i < {self.width}; i++) {variable(name)}[i] = kept_{node.name}[i];"
        for name, node in self.outputs.items():
            count = self.level[node]
            if isinstance(count, int):
                yield f"for (i32 j = 0; j < {count}; j++) {variable(name)}[j] = {node.name}[j];"
            elif node.op == "pack4":
                pairs = f"kept_{self.operands(node)[0].name}"
                yield f"for (i32 i = 0; i < {self.width // 2}; i++)"
                yield f"  {variable(name)}[i] = (u8)({pairs}[2 * i] | {pairs}[2 * i + 1] << 4);"


def _stored(x: Node) -> str:
    """Return the type of an element on the stack. It is not `bool`, because such loops are not vectorized."""
    return "i32" if x.dtype == "bool" else TYPES[x.dtype]


def _loaded(x: Node, place: str) -> str:
    """Return the value of an element on the stack."""
    return f"({place} != 0)" if x.dtype == "bool" else place


def _name(x: Node) -> str:
    """Return the variable for a value with one instance per row."""
    return x.args[0].replace(".", "_") if x.op == "input" else x.name
