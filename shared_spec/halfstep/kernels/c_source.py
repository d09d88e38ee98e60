"""The C source of a kernel, generated from a graph.

`c_source` returns a translation unit whose function `step` updates all parameters of a table. The function
`row`, which is generated here, updates elements that are contiguous in memory and in the whole array. The
driver (`c_driver.py`) divides the table into rows.

Without blocks a row has any length, and its loop runs over a multiple of LANES elements. With blocks a row is
one block of the coarsest cut. Values that are read after a maximum over a block are kept on the stack.

The compiler vectorizes every loop over elements without `-ffast-math`. These spellings are the ones that gcc
12 vectorizes with the bits of PyTorch:

- `(float)(int)x` becomes `trunc(x)`, which is -0 for x in (-1, -0] and stays scalar, so the integer is
combined
  with a zero that the compiler cannot see.
- A maximum of magnitudes is an integer maximum of patterns, because a maximum of floats stays scalar.
- A NaN passes through `minimum` and `maximum` by a mask: nested selects become jumps.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence

from halfstep.kernels.c_driver import LANES, c_driver, variable
from halfstep.kernels.c_head import HEAD, TYPES
from halfstep.kernels.graph import ROWS, Graph, Node, NoGeneratedForm, is_float

_FORMS = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})", "neg": "(-{0})",
    "sqrt": "sqrtf({0})", "floor": "floorf({0})", "round": "even({0})", "sign": "sign({0})",
    "and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})", "shr": "({0} >> {1})",
    "lsr": "lsr({0}, {1})", "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})",
    "le": "({0} <= {1})", "gt": "({0} > {1})", "ge": "({0} >= {1})", "where": "({0} ? {1} : {2})",
    "take": "{0}[{1}]",
}  # fmt: skip
_CONVERTED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_ELEMENT, _BYTE, _SCALAR = "element", "byte", "scalar"
_AGAIN = 6
"""An element that takes at most so many operations is computed again after a maximum instead of kept."""

Reference = Callable[[Node | float, Node], str]


def c_source(graph: Graph) -> str:
    """Return the translation unit of a kernel.

    Raises:
        NoGeneratedForm: for an operation or a dtype that has no form in C.
    """
    row = _Row(graph)
    parts = [HEAD, *row.tables(), row.function(), c_driver(graph, row.arrays(), row.scalars())]
    return "\n".join(part.strip("\n") for part in parts) + "\n"


class _Row:
    """The function that updates one row.

    Attributes:
        level: of each node how many values a row has: `_ELEMENT`, `_BYTE`, `_SCALAR`, or so many.
        phase: of each node how many maxima over the row must be known first.
        late: outputs that are stored last, because a later loop reads the array that they replace.
        kept: elements in an array on the stack.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.width, self.cut = graph, graph.width, bool(graph.cuts)
        self.nodes = [node for node in graph.nodes if node.op not in ("view", "expand")]
        if unknown := {node.dtype for node in self.nodes} - set(TYPES):
            raise NoGeneratedForm(", ".join(map(str, unknown)))
        self.args = {
            node: tuple(_base(x) if isinstance(x, Node) else x for x in node.args) for node in self.nodes
        }
        self.outputs = {name: _base(node) for name, node in graph.outputs.items()}
        self.level = {node: self._level_of(node) for node in self.nodes}
        self.phase: dict[Node, int] = {}
        for node in self.nodes:
            self.phase[node] = self._phase_of(node)
        self._costs: dict[Node, int] = {}
        self.kept = self._kept()
        self.late = self._late()
        self.kept |= set(self.late.values())
        self._spread_already: set[Node] = set()

    def operands(self, node: Node) -> list[Node]:
        """Return the nodes that a node reads."""
        return [x for x in self.args[node] if isinstance(x, Node)]

    def _level_of(self, node: Node) -> str | int:
        if node.shape == () or node.op == "table":
            return _SCALAR
        size = math.prod(node.shape) // ROWS
        is_packed = node.op == "pack4" or any(
            x.op == "unpack4" and self.args[x][0] is node for x in self.nodes
        )
        if is_packed or size not in (self.width, *self._cuts()):
            if size * 2 != self.width:
                raise NoGeneratedForm(f"{node.op} of {size} values of a row of {self.width}")
            return _BYTE
        return _ELEMENT if size == self.width else size

    def _cuts(self) -> list[int]:
        """Return how many blocks a row has of each cut."""
        return [self.width // size for size in self.graph.cuts]

    def _phase_of(self, node: Node) -> int:
        phases, level = [0], self.level[node]
        for x in self.operands(node):
            of = self.level[x]
            if of == _SCALAR or node.op == "slice":  # a slice computes its element anew
                continue
            waits = of in (_ELEMENT, _BYTE) and level not in (_ELEMENT, _BYTE)
            phases.append(self.phase[x] + waits)
        return max(phases)

    def _late(self) -> dict[str, Node]:
        """Return the outputs that are stored last, by name."""
        read_until: dict[str, int] = {}
        for phase in range(max(self.phase.values()) + 1):
            for x in self._needed(self._roots(phase), phase):
                if x.op == "input":
                    read_until[x.args[0]] = phase
        ends = {name: x for name, x in self.outputs.items() if self.level[x] == _ELEMENT}
        return {name: x for name, x in ends.items() if self.phase[x] < read_until.get(name, 0)}

    def _roots(self, phase: int) -> list[Node]:
        """Return the elements that the loop of a phase must compute."""
        kept = [x for x in self._in_order(self.kept) if self.phase[x] == phase and x.op != "unpack4"]
        ends = [x for x in self.outputs.values() if self.level[x] == _ELEMENT and self.phase[x] == phase]
        return [*kept, *ends, *(self.operands(x)[0] for x in self._maxima_after(phase))]

    def _maxima_after(self, phase: int) -> list[Node]:
        """Return the maxima over a whole row that the loop of a phase computes."""
        maxima = [x for x in self.nodes if x.op in ("amax", "any") and self.level[x] == 1]
        return [x for x in maxima if self.phase[x] == phase + 1]

    def _kept(self) -> set[Node]:
        """Return the elements that another loop reads, if computing them again takes long."""
        kept = {node for node in self.nodes if node.op == "unpack4"}
        for node in self.nodes:
            for x in self.operands(node):
                if self.level[x] != _ELEMENT or x.op == "input":
                    continue
                later = self.level[node] in (_ELEMENT, _BYTE) and self.phase[node] > self.phase[x]
                in_parts = node.op in ("amax", "any") and self.level[node] != 1
                if node.op == "pack4" or in_parts or (later and self._cost(x) > _AGAIN):
                    kept.add(x)
        return kept

    def _cost(self, node: Node) -> int:
        """Return how many operations an element takes from its inputs, values of blocks and scalars."""
        if node not in self._costs:
            free = node.op == "input" or self.level[node] != _ELEMENT
            self._costs[node] = 0 if free else 1 + sum(map(self._cost, self.operands(node)))
        return self._costs[node]

    # The parts of the translation unit.

    def tables(self) -> list[str]:
        """Return the constants of tables of codes."""
        found = [node for node in self.nodes if node.op == "table"]
        return [
            f"static const float {x.name}[] = {{{', '.join(_number(v, 'float32') for v in x.args[0])}}};"
            for x in found
        ]

    def arrays(self) -> list[tuple[str, str, int]]:
        """Return the arrays of a row: name, type, and how many elements share an entry."""
        return [(x.name, TYPES[x.dtype], x.shared) for x in self.graph.memory]

    def scalars(self) -> list[Node]:
        """Return the inputs that are one value for a parameter."""
        return [node for node in self.nodes if node.op == "input" and node.shape == ()]

    def function(self) -> str:
        """Return the function `row`."""
        taken = [
            f"{'const ' * (name == 'g')}{of} *restrict {variable(name)}" for name, of, _ in self.arrays()
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
            for x in self._in_order(self.kept)
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

    def _in_order(self, nodes: set[Node]) -> list[Node]:
        return [node for node in self.nodes if node in nodes]

    def _type(self, node: Node) -> str:
        return TYPES[node.dtype]

    # Values of blocks.

    def _of_blocks(self, node: Node) -> list[str]:
        """Return the statements that compute the values of a row's blocks."""
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
        """Return a value as the j-th of `count` blocks reads it."""
        if not isinstance(x, Node) or self.level[x] == _SCALAR:
            return self._in_row(x, by)
        of = self.level[x]
        if not isinstance(of, int):
            raise NoGeneratedForm(f"{by.op} of a block, of single elements")
        return f"{x.name}[j]" if of == count else f"{x.name}[j * {of} / {count}]"

    def _in_row(self, x: Node | float, by: Node) -> str:
        """Return a number, or a value that a row has once."""
        if not isinstance(x, Node):
            return _number(x, _dtype_of_number(by))
        return _number(x.args[0], x.dtype) if x.op == "const" else _name(x)

    # Loops over elements.

    def _loop(self, phase: int) -> list[str]:
        """Return the loop over the elements of a phase."""
        ends = {
            name: x
            for name, x in self.outputs.items()
            if self.level[x] == _ELEMENT and self.phase[x] == phase and name not in self.late
        }
        kept = [x for x in self._in_order(self.kept) if self.phase[x] == phase and x.op != "unpack4"]
        maxima, roots = self._maxima_after(phase), self._roots(phase)
        lines = [
            line
            for x in self._in_order(self.kept)
            if x.op == "unpack4" and self.phase[x] == phase
            for line in self._unpacked(x)
        ]
        if not roots:
            return lines
        todo = self._needed(roots, phase)
        spread = self._spread(todo)
        head: list[str] = []
        body: list[str] = []
        for x in todo:
            if self._is_at_hand(x, phase):
                body.append(f"const {self._type(x)} {x.name} = {_loaded(x, f'kept_{x.name}[i]')};")
            elif x.op == "mul" and _is_index(self.args[x][0]):
                by = self._in_row(self.args[x][1], x)
                head.append(f"u32 run_{x.name} = first * (u32){by};")
                body.append(f"const i32 {x.name} = (i32)run_{x.name}; run_{x.name} += (u32){by};")
            elif _is_index(x):
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

    def _is_at_hand(self, x: Node, phase: int) -> bool:
        """Whether an element can be read from the stack."""
        return x in self.kept and (self.phase[x] < phase or x.op == "unpack4")

    def _needed(self, roots: Sequence[Node], phase: int) -> list[Node]:
        """Return the elements that a loop computes or reads, in order."""
        needed, waiting = set(), [x for x in roots if self.level[x] == _ELEMENT]
        while waiting:
            x = waiting.pop()
            if x in needed:
                continue
            needed.add(x)
            if self._is_at_hand(x, phase) or (x.op == "mul" and _is_index(self.args[x][0])):
                continue
            waiting += [y for y in self.operands(x) if self.level[y] == _ELEMENT]
        return self._in_order(needed)

    def _spread(self, todo: Sequence[Node]) -> list[str]:
        """Return loops that copy values of blocks to each element: nested loops are not vectorized."""
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
        """Return a value as the i-th element reads it."""
        if not isinstance(x, Node) or self.level[x] == _SCALAR:
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

    def _stores(self) -> Iterator[str]:
        """Yield the statements that store values of blocks, packed codes, and late outputs."""
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

    def _form(self, node: Node, reference: Reference) -> str:
        """Return the expression of an operation, given how its operands are referred to."""
        op, dtype = node.op, node.dtype
        given = [reference(x, node) for x in self.args[node]]
        first = self.args[node][0]
        if op in ("minimum", "maximum"):
            return _extreme(op, dtype, given, isinstance(self.args[node][1], Node))
        if op == "abs":
            return f"fabsf({given[0]})" if dtype == "float32" else f"abs({given[0]})"
        if op == "not":
            return f"(!{given[0]})" if dtype == "bool" else f"({self._type(node)})(~{given[0]})"
        if op == "shl":
            return f"(({self._type(node)})((u32){given[0]} << {given[1]}))"
        if op == "bitcast":
            return f"{'bits' if dtype == 'int32' else 'real'}({given[0]})"
        if op == "cast" and isinstance(first, Node):
            return self._cast(node, first, given[0])
        if op not in _FORMS or (op in ("add", "sub", "mul", "div") and dtype not in ("float32", "int32")):
            raise NoGeneratedForm(f"{op} of {dtype}")
        return _FORMS[op].format(*given)

    def _cast(self, node: Node, source: Node, given: str) -> str:
        dtype = node.dtype
        if dtype == "bool":
            return f"({given} != 0)"
        if source.dtype == "bool":  # a select: g++ does not vectorize the conversion
            return f"({given} ? {_number(1, dtype)} : {_number(0, dtype)})"
        if dtype in _CONVERTED and source.dtype == "float32":
            return f"upper_half({given})" if node.exact else f"to_{dtype}({given})"
        if source.dtype in _CONVERTED and dtype == "float32":
            return f"of_{source.dtype}({given})"
        if dtype in _CONVERTED or source.dtype in _CONVERTED:
            raise NoGeneratedForm(f"a cast from {source.dtype} to {dtype}")
        from_float = source.op == "cast" and source.args[0].dtype == "float32"
        if dtype == "float32" and from_float and not is_float(source.dtype):
            return f"((float)({given} | zero))"
        return f"(({self._type(node)}){given})"


def _base(x: Node) -> Node:
    """Return a node without its views, which do not change the row-major order."""
    while x.op in ("view", "expand"):
        x = x.args[0]
    return x


def _stored(x: Node) -> str:
    """Return the type of an element on the stack: no loop that loads a `bool` is vectorized."""
    return "i32" if x.dtype == "bool" else TYPES[x.dtype]


def _loaded(x: Node, place: str) -> str:
    """Return the value of an element that is on the stack."""
    return f"({place} != 0)" if x.dtype == "bool" else place


def _is_index(x: Node | float) -> bool:
    return isinstance(x, Node) and x.op == "input" and x.args[0] == "index"


def _name(x: Node) -> str:
    """Return the variable of a value that a row has once."""
    return x.args[0].replace(".", "_") if x.op == "input" else x.name


def _extreme(op: str, dtype: str, given: Sequence[str], both: bool) -> str:
    """Return a minimum or a maximum, through which a NaN passes; with a constant, one select is enough."""
    a, b = given
    if dtype != "float32":
        return f"{'smaller' if op == 'minimum' else 'larger'}({a}, {b})"
    return f"{op}({a}, {b})" if both else f"({a} {'>' if op == 'minimum' else '<'} {b} ? {b} : {a})"


def _dtype_of_number(by: Node) -> str:
    """Return the dtype of a number among the operands of a node."""
    if by.op in ("eq", "ne", "lt", "le", "gt", "ge"):
        return by.operands[0].dtype
    return by.dtype


def _number(x: float, dtype: str) -> str:
    """Return a literal with the bits of a number."""
    if not is_float(dtype):
        return "((i32)0x80000000u)" if int(x) == -(1 << 31) else f"({int(x)})"
    if dtype != "float32":
        raise NoGeneratedForm(f"a constant of {dtype}")
    if not math.isfinite(x):
        return '__builtin_nanf("")' if math.isnan(x) else f"({'-' * (x < 0)}__builtin_inff())"
    (rounded,) = struct.unpack("<f", struct.pack("<f", x))
    return f"({rounded.hex()}f)"
