"""Tracing a program: its calls are traced by JAX on rows of elements, and each equation becomes a node."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.kernels.graph import ROWS, Graph, Node, NoGeneratedForm, is_float
from halfstep_jax.kernels.program import Program
from halfstep_jax.kernels.rows import run_on_rows, shape_on_rows
from halfstep_jax.leaf_calls import Places, Traced, kernel_trace
from halfstep_jax.xla.passes import core

_WIDTH = 256
"""Elements of a row if no format has blocks."""

_SAME = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg", "abs": "abs", "sqrt": "sqrt",
    "floor": "floor", "max": "maximum", "min": "minimum",
    "and": "and", "or": "or", "xor": "xor", "not": "not",
    "shift_left": "shl", "shift_right_logical": "lsr", "shift_right_arithmetic": "shr",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
    # Of this package (`xla`): what is opaque is so to XLA alone.
    "correct_sqrt": "sqrt", "correct_divide": "div", "correct_divide_by_scale": "div",
}  # fmt: skip
_FIRST_OPERAND = frozenset(
    "copy opaque opaque_product zero_of_pass zero_of_pass_on_cpu zero_on_cpu stored_with without_derivative "
    "stop_gradient optimization_barrier pvary".split()
)
_ORDERED = ("lt", "le", "gt", "ge", "maximum", "minimum")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_COMMUTE = ("maximum", "minimum", "add", "mul", "and", "or", "xor")
_SIGN = -(1 << 31)

Operand = Any
"""A node, or a number of Python."""


def trace(program: Program) -> Graph:
    """Return the graph of a program.

    Raises:
        NoGeneratedForm: for an equation that is no elementwise operation.
    """
    if core is None:
        raise NoGeneratedForm("this version of JAX")
    width = program.cuts[0] if program.cuts else _WIDTH
    columns = sum(1 + len(roles) for roles in program.roles)
    avals = {x.name: jax.ShapeDtypeStruct(shape_on_rows(x, width), x.dtype) for x in program.arrays}
    avals |= {f"number.{i}": jax.ShapeDtypeStruct((), "float32") for i in range(program.numbers)}
    avals |= {f"key.{i}": jax.ShapeDtypeStruct((), "uint32") for i in range(columns)}
    avals |= {"index": jax.ShapeDtypeStruct((ROWS, width), "uint32")}
    avals |= {f"first.{cut}": jax.ShapeDtypeStruct((ROWS, width // cut), "uint32") for cut in program.cuts}

    def run(given: dict[str, jax.Array]) -> list[jax.Array]:
        with kernel_trace(Places(given["index"], {cut: given[f"first.{cut}"] for cut in program.cuts})):
            return run_on_rows(program, given, width, np.uint32(0))

    traced = jax.make_jaxpr(run)(avals)
    reader = _Reader()
    names = sorted(avals)  # as JAX flattens a dict
    inputs = [reader.node("input", (name,), avals[name].shape, _dtype(avals[name].dtype)) for name in names]
    made = reader.read(traced.jaxpr, traced.consts, inputs)
    outputs = {}
    for x, (_, _, row) in zip(made, program.results, strict=True):
        if not isinstance(x, Node):
            x = reader.node("const", (x,), (), row.dtype)
        outputs[row.name] = reader.cast(x, row.dtype, shape_on_rows(row, width))
    new = [row for _, _, row in program.results if row not in program.arrays]
    memory = (*program.arrays, *new)
    return Graph(
        reader.nodes, outputs, memory, program.cuts, width, program.numbers, columns, _seconds(program)
    )


def _seconds(program: Program) -> frozenset[int]:
    """Return the columns of keys that are a k1."""
    found, at = set(), 0
    for roles in program.roles:
        found |= set(range(at + 1, at + 1 + len(roles)))
        at += 1 + len(roles)
    return frozenset(found)


class _Reader:
    """Makes nodes of equations. Equal operations are one node; int32 stands for uint32."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple, Node] = {}

    def node(self, op: str, args: tuple, shape: tuple, dtype: str, axes: tuple[int, ...] = ()) -> Node:
        """Return the node of an operation."""
        parts = tuple(id(x) if isinstance(x, Node) else (type(x), repr(x)) for x in args)
        key = (op, parts, shape, dtype, axes)
        if key not in self._known:
            self._known[key] = made = Node(op, args, shape, dtype, axes)
            self.nodes.append(made)
        return self._known[key]

    def read(self, jaxpr: Traced, consts: Sequence, inputs: Sequence[Operand]) -> list[Operand]:
        """Return the results of a jaxpr, given its inputs."""
        known: dict[Traced, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= dict(zip(jaxpr.constvars, map(_number, consts), strict=True))

        def value(x: Traced) -> Operand:
            return _number(x.val) if isinstance(x, core.Literal) else known[x]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [value(x) for x in eqn.invars])
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def _results(self, eqn: Traced, operands: list[Operand]) -> list[Operand]:
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit", "closed_call", "core_call", "remat", "custom_jvp_call", "custom_vjp_call"):
            inner = params.get("jaxpr") or params.get("call_jaxpr")
            consts = getattr(inner, "consts", ())
            return self.read(getattr(inner, "jaxpr", inner), consts, operands)
        if name == "platform_index":
            return [next(i for i, x in enumerate(params["platforms"]) if x is None)]
        if name == "cond" and isinstance(operands[0], int):
            chosen = params["branches"][min(operands[0], len(params["branches"]) - 1)]
            return self.read(chosen.jaxpr, chosen.consts, operands[1:])
        if len(eqn.outvars) != 1:
            raise NoGeneratedForm(name)
        return [self._result(eqn, name, operands)]

    def _result(self, eqn: Traced, name: str, operands: list[Operand]) -> Operand:
        (out,) = (x.aval for x in eqn.outvars)
        shape, dtype = tuple(out.shape), _dtype(out.dtype)
        first = operands[0]
        if not any(isinstance(x, Node) for x in operands):
            return _folded(eqn, operands)
        if name in _FIRST_OPERAND:
            return first
        if name == "straight_through":
            return operands[1]
        if name in _SAME:
            return self._arithmetic(_SAME[name], eqn, operands, shape, dtype)
        of: dict[str, Callable[[], Operand]] = {
            "opaque_widened": lambda: self.cast(first, "float32", shape),
            "convert_element_type": lambda: self._converted(eqn, first, shape, dtype),
            "bitcast_convert_type": lambda: self._bitcast(first, shape, dtype),
            "select_n": lambda: self.node("where", (first, *operands[2:0:-1]), shape, dtype),
            "square": lambda: self.node("mul", (first, first), shape, dtype),
            "is_finite": lambda: self._is_finite(first, shape),
            "integer_pow": lambda: self._power(eqn.params["y"], first, shape, dtype),
            "round": lambda: self._rounded(eqn.params["rounding_method"], first, shape, dtype),
            "clamp": lambda: self._clamped(operands, shape, dtype),
            "reshape": lambda: self._viewed(first, shape),
            "squeeze": lambda: self._viewed(first, shape),
            "expand_dims": lambda: self._viewed(first, shape),
            "broadcast_in_dim": lambda: self._broadcast(first, shape, eqn.params["broadcast_dimensions"]),
            "reduce_max": lambda: self._reduced("amax", first, shape, dtype, eqn.params["axes"]),
        }
        if name not in of:
            raise NoGeneratedForm(name)
        return of[name]()

    def _arithmetic(self, op: str, eqn: Traced, operands: list, shape: tuple, dtype: str) -> Operand:
        kind = _dtype(eqn.invars[0].aval.dtype)
        is_unsigned = str(eqn.invars[0].aval.dtype) == "uint32"
        if (op in _COMPARED and kind in ("bfloat16", "float16")) or kind.startswith("float8"):
            if op not in _COMPARED:
                raise NoGeneratedForm(f"{op} of {kind}")
            operands = [self.cast(x, "float32", x.shape) if isinstance(x, Node) else x for x in operands]
        if op in _COMMUTE and not isinstance(operands[0], Node):
            operands = operands[::-1]
        if op in ("and", "or", "xor") and kind != "bool" and operands[1] == 0:
            return 0 if op == "and" else operands[0]
        if op in _ORDERED and is_unsigned:
            operands = [self._flipped(x, shape) for x in operands]
            made = self.node(op, tuple(operands), shape, dtype)
            return made if op in _COMPARED else self._flipped(made, shape)
        return self.node(op, tuple(operands), shape, dtype)

    def _flipped(self, x: Operand, shape: tuple) -> Operand:
        """Return a pattern whose order among integers with a sign is that of x among those without."""
        if not isinstance(x, Node):
            return x ^ _SIGN
        return self.node("xor", (x, _SIGN), x.shape, x.dtype)

    def cast(self, x: Node, dtype: str, shape: tuple) -> Node:
        """Return a node in another dtype; one that was widened and comes back is what it was."""
        if x.dtype == dtype:
            return x
        if x.op == "cast" and x.args[0].dtype == dtype and x.dtype == "float32" and is_float(dtype):
            return x.args[0]
        return self.node("cast", (x,), x.shape, dtype)

    def _converted(self, eqn: Traced, x: Node, shape: tuple, dtype: str) -> Node:
        source, target = str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype)
        if (
            source == "uint32"
            and is_float(dtype)
            and not (x.op == "cast" and x.args[0].dtype in ("uint8", "bool"))
        ):
            raise NoGeneratedForm("floats of uint32")
        if is_float(source) and target == "uint32":
            raise NoGeneratedForm("uint32 of floats")
        if dtype == "uint4" or source == "uint4":
            return x
        return self.cast(x, dtype, shape)

    def _bitcast(self, x: Node, shape: tuple, dtype: str) -> Operand:
        if dtype == "uint4":
            packed = x.args[0] if x.op == "view" else x
            if packed.op == "pack4":
                return self._viewed(packed.args[0], shape)
            return self.node("unpack4", (x,), shape, "uint8")
        if len(shape) < len(x.shape):  # of codes of 4 bits
            whole = self._viewed(x, (x.shape[0], math.prod(x.shape[1:])))
            return self._viewed(
                self.node("pack4", (whole,), (x.shape[0], whole.shape[1] // 2), "uint8"), shape
            )
        if x.dtype == dtype:
            return x
        if x.op == "bitcast" and x.args[0].dtype == dtype:
            return x.args[0]
        return self.node("bitcast", (x,), shape, dtype)

    def _is_finite(self, x: Node, shape: tuple) -> Node:
        return self.node("lt", (self.node("abs", (x,), shape, x.dtype), math.inf), shape, "bool")

    def _power(self, y: int, x: Node, shape: tuple, dtype: str) -> Node:
        if y != 2:
            raise NoGeneratedForm(f"a power of {y}")
        return self.node("mul", (x, x), shape, dtype)

    def _rounded(self, method: Traced, x: Node, shape: tuple, dtype: str) -> Node:
        if int(method) != int(jax.lax.RoundingMethod.TO_NEAREST_EVEN):
            raise NoGeneratedForm("rounding ties away from zero")
        return self.node("round", (x,), shape, dtype)

    def _clamped(self, operands: list, shape: tuple, dtype: str) -> Node:
        low, x, high = operands
        return self.node("minimum", (self.node("maximum", (x, low), shape, dtype), high), shape, dtype)

    def _viewed(self, x: Node, shape: tuple) -> Node:
        return x if x.shape == shape else self.node("view", (x,), shape, x.dtype)

    def _broadcast(self, x: Node, shape: tuple, dimensions: tuple[int, ...]) -> Node:
        places = dict(zip(dimensions, x.shape, strict=True))
        whole = tuple(places.get(axis, 1) for axis in range(len(shape)))
        if x.shape and places.get(0) != x.shape[0]:
            raise NoGeneratedForm("values that rows share")
        viewed = self._viewed(x, whole) if x.shape else x
        return viewed if whole == shape else self.node("expand", (viewed,), shape, x.dtype)

    def _reduced(self, op: str, x: Node, shape: tuple, dtype: str, axes: tuple[int, ...]) -> Node:
        if tuple(axes) != (len(x.shape) - 1,) or not x.shape:
            raise NoGeneratedForm("a maximum over rows")
        return self._viewed(self.node(op, (x,), (*x.shape[:-1], 1), dtype, tuple(axes)), shape)


def _dtype(dtype) -> str:
    """Return the dtype of a node: int32 stands for uint32, whose operations have the same patterns."""
    name = str(jnp.dtype(dtype)) if not isinstance(dtype, str) else dtype
    return "int32" if name == "uint32" else name


def _number(x) -> Operand:
    """Return a constant as a number of Python, a uint32 as an int32 of the same pattern."""
    x = np.asarray(x)
    if x.ndim and x.size:
        patterns = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1)
        x = x.reshape(-1)[0] if (patterns == patterns[0]).all() else x
    if x.ndim:
        raise NoGeneratedForm("a table")
    if x.dtype == np.uint32:
        return int(x.view(np.int32))
    return float(x) if is_float(str(x.dtype)) else x.item()


def _folded(eqn: Traced, operands: Sequence[Operand]) -> Operand:
    """Return the result of an equation of constants."""
    given = []
    for x, var in zip(operands, eqn.invars, strict=True):
        dtype = np.dtype(var.aval.dtype)
        value = np.int64(x).astype(dtype) if dtype == np.uint32 else np.asarray(x).astype(dtype)
        given.append(np.broadcast_to(value, var.aval.shape))
    with jax.ensure_compile_time_eval():
        made = eqn.primitive.bind(*map(jnp.asarray, given), **eqn.params)
    return _number(made)
