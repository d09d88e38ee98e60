"""The Triton form for each operation in a graph, which is an expression that rounds once."""

import math
import struct

from halfstep.kernels.graph import ROWS, Graph, Node, NoGeneratedForm, is_float

TYPES = {
    "float32": "tl.float32", "float64": "tl.float64", "bfloat16": "tl.bfloat16",
    "float16": "tl.float16", "int64": "tl.int64", "int32": "tl.int32", "int16": "tl.int16",
    "int8": "tl.int8", "uint8": "tl.uint8", "bool": "tl.int1",
    "float8_e4m3fn": "tl.float8e4nv", "float8_e5m2": "tl.float8e5",
}  # fmt: skip
_FORMS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "abs": "tl.abs({0})",
    "sqrt": "sqrt_rn({0})", "floor": "tl.floor({0})", "round": "rint({0})",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "shl": "{0} << {1}", "shr": "{0} >> {1}",
    "lsr": "({0}.to(tl.uint32, bitcast=True) >> {1}).to(tl.int32, bitcast=True)",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "where": "tl.where({0}, {1}, {2})", "take": "tl.load({0} + {1})",
    "sign": "({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32)",
}  # fmt: skip
_RINT = '''
@triton.jit
def rint(x):
    """Round to the nearest whole number, ties to even. From 2^23 on every float32 is whole."""
    size = tl.abs(x)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size).to(tl.int32, bitcast=True)
    return (whole | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
'''
_PACK = """
@triton.jit
def pack4(x):
    low, high = tl.split(x)
    return (low | (high << 4)).to(tl.uint8)
"""
_EXACT = """
@triton.jit
def sqrt_rn(x):
    return tl.sqrt_rn(x)


@triton.jit
def div_rn(x, y):
    return tl.div_rn(x, y)
"""
# Triton's own root and quotient flush subnormal numbers before version 3.6.
_EXACT_PTX = """
@triton.jit
def sqrt_rn(x):
    return tl.inline_asm_elementwise(
        "sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def div_rn(x, y):
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )
"""


def functions_of(graph: Graph, exact_by_ptx: bool) -> list[str]:
    """Return the functions that forms call. With `exact_by_ptx`, roots and quotients are PTX."""
    optional = (("round", _RINT), ("pack4", _PACK))
    used = {node.op for node in graph.nodes}
    return [_EXACT_PTX if exact_by_ptx else _EXACT, *(text for op, text in optional if op in used)]


class Forms:
    """The forms for a graph's operations, with block variables from `triton_source.py`."""

    def __init__(self, graph: Graph) -> None:
        self._width = graph.width
        # The product with `offs` leaves the loop. Kernels with blocks, but no tables, lack registers for it.
        self._sums_counters = not graph.cuts or any(node.op == "table" for node in graph.nodes)

    def form(self, node: Node) -> str:
        """Return the expression for an operation."""
        op = node.op
        if op in ("table", "iota", "slice", "pad", "cat", "pow", "amin", "all"):
            raise NoGeneratedForm(op)
        given = [operand(arg, node) for arg in node.args]
        if op == "mul" and self._sums_counters and _is_index(node.args[0]):
            return f"{given[0]} * {given[1]} if REST else index.to(tl.int32) * {given[1]} + offs * {given[1]}"
        if op in ("minimum", "maximum"):
            nan = ", propagate_nan=tl.PropagateNan.ALL" if is_float(node.dtype) else ""
            return f"tl.{op}({given[0]}, {given[1]}{nan})"
        if op == "neg":  # Triton's own is 0 - x, which is +0 for +0
            return f"{given[0]} * -1.0" if is_float(node.dtype) else f"0 - {given[0]}"
        if node.dtype == "float64" and op in ("div", "sqrt"):  # rounded correctly by every device
            return f"{given[0]} / {given[1]}" if op == "div" else f"tl.sqrt({given[0]})"
        if op == "div":
            return f"div_rn({self._whole(node.args[0], node)}, {self._whole(node.args[1], node)})"
        if op == "not":
            return f"{given[0]} == 0" if node.dtype == "bool" else f"~{given[0]}"
        if op in ("cast", "bitcast"):
            return f"{given[0]}.to({TYPES[node.dtype]}{', bitcast=True' if op == 'bitcast' else ''})"
        if op == "view":
            return f"tl.reshape({given[0]}, {self._shape(node.shape)})"
        if op == "expand":
            return f"tl.broadcast_to({given[0]}, {self._shape(node.shape)})"
        if op in ("amax", "any"):
            return self._reduction(node, given[0])
        if op == "unpack4":
            return f"tl.reshape(tl.join({given[0]} & 15, {given[0]} >> 4), {self._shape(node.shape)})"
        if op == "pack4":
            return f"pack4(tl.reshape({given[0]}, {self._shape((*node.shape, 2))}))"
        if op not in _FORMS:
            raise NoGeneratedForm(op)
        return _FORMS[op].format(*given)

    def _reduction(self, node: Node, given: str) -> str:
        """Return a maximum along a block, to which elements outside of the array contribute 0."""
        source = node.args[0]
        if math.prod(source.shape) == ROWS * self._width:
            same = source.shape == (ROWS, self._width)
            mask = "mask" if same else f"tl.reshape(mask, {self._shape(source.shape)})"
            nothing = "False" if node.op == "any" else "0.0"
            given = f"(tl.where({mask}, {given}, {nothing}) if REST else {given})"
        if node.op == "any":
            (axis,) = node.axes
            return f"tl.max({given}.to(tl.int32), axis={axis}, keep_dims=True) != 0"
        for axis in reversed(node.axes):
            given = f"tl.max({given}, axis={axis}, keep_dims=True)"
        return given

    def _whole(self, x: Node | float, node: Node) -> str:
        """Return an operand in the shape of a result, because `div_rn` does not broadcast constants."""
        if isinstance(x, Node) and x.op != "const":
            return x.name
        return f"tl.full({self._shape(node.shape)}, {operand(x, node)}, tl.float32)"

    def _shape(self, shape: tuple[int, ...]) -> str:
        """Return a shape from the graph with R rows, as in the kernel, instead of ROWS."""
        if not shape:
            return "[]"
        rows = "R" if shape[0] == ROWS else f"R * {shape[0] // ROWS}"
        return f"[{', '.join([rows, *map(str, shape[1:])])}]"


def _is_index(x: Node | float) -> bool:
    return isinstance(x, Node) and x.op == "input" and x.args[0] == "index"


def operand(x: Node | float, node: Node) -> str:
    """Return an operand, which is a node's name, or a constant that Triton reads as float32."""
    value = x.args[0] if isinstance(x, Node) and x.op == "const" else x
    if isinstance(value, Node):
        return value.name
    if isinstance(value, int) or not math.isfinite(value):
        return repr(value) if isinstance(value, int) else f'float("{value}")'
    if node.dtype == "float64" and node.op != "cast":
        return f"tl.full([], {value!r}, tl.float64)"
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    if rounded == 0 and math.copysign(1, rounded) < 0:  # Triton would turn it into +0
        return f"tl.full([], {-(1 << 31)}, tl.int32).to(tl.float32, bitcast=True)"
    if 0 < abs(rounded) < 2.0**-126:  # Triton would make it float64
        raise NoGeneratedForm(f"the subnormal constant {rounded}")
    return repr(rounded)
