"""The C form for each operation in a graph, which is an expression that rounds once.

gcc 12 vectorizes these forms without `-ffast-math`, and they have PyTorch's bits:

- `(float)(int)x` becomes `trunc(x)`, which is -0 for x in (-1, -0] and stays scalar, so the integer is
  combined with a zero that the compiler cannot see.
- A maximum of magnitudes is an integer maximum of patterns, because a maximum of floats stays scalar.
- A NaN passes through `minimum` and `maximum` by a mask: nested selects become jumps.
"""

import math
import struct
from collections.abc import Sequence

from halfstep.kernels.c_head import TYPES
from halfstep.kernels.graph import Node, NoGeneratedForm, is_float

_FORMS = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})", "neg": "(-{0})",
    "sqrt": "sqrtf({0})", "floor": "floorf({0})", "round": "even({0})", "sign": "sign({0})",
    "and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})", "shr": "({0} >> {1})",
    "lsr": "lsr({0}, {1})", "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})",
    "le": "({0} <= {1})", "gt": "({0} > {1})", "ge": "({0} >= {1})", "where": "({0} ? {1} : {2})",
    "take": "{0}[{1}]",
}  # fmt: skip
_CONVERTED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def form(node: Node, args: Sequence[Node | float], given: Sequence[str]) -> str:
    """Return the expression for an operation, given its operands and their C expressions."""
    op, dtype, first = node.op, node.dtype, args[0]
    if op in ("minimum", "maximum"):
        return _extreme(op, dtype, given, isinstance(args[1], Node))
    if op == "abs":
        return f"fabsf({given[0]})" if dtype == "float32" else f"abs({given[0]})"
    if op == "not":
        return f"(!{given[0]})" if dtype == "bool" else f"({TYPES[dtype]})(~{given[0]})"
    if op == "shl":
        return f"(({TYPES[dtype]})((u32){given[0]} << {given[1]}))"
    if op == "bitcast":
        return _bitcast(node, given[0])
    if op == "cast" and isinstance(first, Node):
        return _cast(node, first, given[0])
    if op not in _FORMS or (op in ("add", "sub", "mul", "div") and dtype not in ("float32", "int32")):
        raise NoGeneratedForm(f"{op} of {dtype}")
    return _FORMS[op].format(*given)


def _bitcast(node: Node, given: str) -> str:
    source, target = (TYPES[x.dtype] for x in (*node.operands, node))
    if {source, target} == {"float", "i32"}:
        return f"{'bits' if target == 'i32' else 'real'}({given})"
    if source.lstrip("iu") != target.lstrip("iu"):
        raise NoGeneratedForm(f"the patterns of {node.operands[0].dtype} as {node.dtype}")
    return f"(({target}){given})"  # a float of 8 or 16 bits is an integer in C


def _cast(node: Node, source: Node, given: str) -> str:
    dtype = node.dtype
    if dtype == "bool":
        return f"({given} != 0)"
    if source.dtype == "bool":  # a select: g++ does not vectorize the conversion
        return f"({given} ? {number(1, dtype)} : {number(0, dtype)})"
    if dtype in _CONVERTED and source.dtype == "float32":
        return f"upper_half({given})" if node.exact else f"to_{dtype}({given})"
    if source.dtype in _CONVERTED and dtype == "float32":
        return f"of_{source.dtype}({given})"
    if dtype in _CONVERTED or source.dtype in _CONVERTED:
        raise NoGeneratedForm(f"a cast from {source.dtype} to {dtype}")
    from_float = source.op == "cast" and source.args[0].dtype == "float32"
    if dtype == "float32" and from_float and not is_float(source.dtype):
        return f"((float)({given} | zero))"
    return f"(({TYPES[node.dtype]}){given})"


def _extreme(op: str, dtype: str, given: Sequence[str], both: bool) -> str:
    """Return a minimum or maximum that keeps NaN. With a constant, one select is enough."""
    a, b = given
    if dtype != "float32":
        return f"{'smaller' if op == 'minimum' else 'larger'}({a}, {b})"
    return f"{op}({a}, {b})" if both else f"({a} {'>' if op == 'minimum' else '<'} {b} ? {b} : {a})"


def dtype_of_number(by: Node) -> str:
    """Return the dtype for a number among a node's operands."""
    if by.op in ("eq", "ne", "lt", "le", "gt", "ge"):
        return by.operands[0].dtype
    return by.dtype


def number(x: float, dtype: str) -> str:
    """Return a literal with the bits of a number."""
    if not is_float(dtype):
        return "((i32)0x80000000u)" if int(x) == -(1 << 31) else f"({int(x)})"
    if dtype == "float16":
        return f"({int.from_bytes(struct.pack('<e', x), 'little')})"
    if dtype != "float32":
        raise NoGeneratedForm(f"a constant of {dtype}")
    if not math.isfinite(x):
        return '__builtin_nanf("")' if math.isnan(x) else f"({'-' * (x < 0)}__builtin_inff())"
    (rounded,) = struct.unpack("<f", struct.pack("<f", x))
    return f"({rounded.hex()}f)"
