"""Tracing a stage: `Stage.run` runs once on tensors without memory, and each operation becomes a node."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Documented in PyTorch's notes on extending it, under this name alone.
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.hyperparameters import Values
from halfstep.kernels.graph import ROWS, SUMS, Graph, Node, NoGeneratedForm, RowArray, is_float
from halfstep_torch.engine.number_places import flat, unflat
from halfstep_torch.engine.scaling import WEIGHTS
from halfstep_torch.engine.stage import Stage

_SAME = {
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "__lshift__": "shl", "__rshift__": "shr",
    "__ilshift__": "shl", "__irshift__": "shr", "__and__": "and", "__or__": "or", "__xor__": "xor",
    "logical_not": "not", "logical_and": "and", "logical_or": "or",
    **{op: op for op in (
        "add", "sub", "mul", "div", "neg", "abs", "sqrt", "sign", "floor", "round", "minimum", "maximum",
        "eq", "ne", "lt", "le", "gt", "ge",
    )},
}  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_VIEWS = ("view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "alias", "detach", "permute")
_COPIES = ("clone", "contiguous", "lift_fresh", "detach", "alias")
_FILLED = {
    "zeros": 0,
    "zeros_like": 0,
    "ones": 1,
    "ones_like": 1,
    "empty": 0,
    "empty_like": 0,
    "new_empty": 0,
}
_NARROWER = {
    "float32": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "float64": ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "int16": ("uint8", "int8"),
    "int32": ("uint8", "int8", "int16"),
    "int64": ("uint8", "int8", "int16", "int32"),
}
"""Of each dtype the dtypes all of whose numbers it holds."""


Operand = Any
"""A tensor, a number, a dtype or a list of them: aten operations take all of these."""
Operands = Sequence[Operand]


def trace(stage: Stage, places: Values, grad_dtype: torch.dtype) -> Graph:
    """Return the graph of an elementwise stage, which takes 20 to 150 ms.

    Args:
        stage: with whole blocks alone, as `Stage.padded` has them.
        places: of its numbers, as `number_places` gives them.
        grad_dtype: of the gradient, or float32 for the update of a stage before.

    Raises:
        NoGeneratedForm: for an operation that the tracer does not know.
    """
    tracer, width = _Tracer(), stage.width

    def given(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device="meta")
        tracer.set(x, tracer.node("input", (name,), x))
        return x

    p, g = given("p", (ROWS, width), stage.dtype), given("g", (ROWS, width), grad_dtype)
    state = {}
    for name, spec in stage.arrays.items():
        size = spec.size(width)
        state[name] = given(name, (ROWS * size,) if spec.scale_of is not None else (ROWS, size), spec.dtype)
    numbers = [given(f"number.{i}", (), torch.float32) for i in range(len(flat(places)))]
    keys = [given(f"key.{i}", (), torch.int32) for i in range(sum(1 + len(roles) for roles in stage.roles))]
    index = given("index", (ROWS, width), torch.int32)
    with tracer:
        out, new = stage.run(p, g, state, unflat(places, numbers), stage.row_words(lambda: index, keys))
        outputs = {"p" if stage.applies else "u": tracer.of(out)}
        outputs |= {
            name: tracer.cast(tracer.of(array), dtype_name(state[name].dtype) if name in state else "float32")
            for name, array in new.items()
        }
    cuts = tuple(blocks.size for blocks in stage.blocks)
    memory = _memory(stage, grad_dtype)
    return Graph(
        tracer.nodes, outputs, memory, cuts, width, len(numbers), len(keys), _second_keys(stage.roles)
    )


def measured(graph: Graph, sums: str) -> Graph:
    """Return the graph of a stage that leaves an update, of which only sums of a kind are taken (`SUMS`)."""
    outputs = {"norm.u": graph.outputs["u"]}
    if WEIGHTS in graph.outputs:
        outputs["norm.p"] = graph.outputs[WEIGHTS]
    p, g, _, *state = graph.memory
    memory = p, g, *(RowArray(name, "float32") for name in outputs), *state
    numbers = graph.numbers + (len(outputs) if SUMS[sums].has_units else 0)
    return dataclasses.replace(graph, outputs=outputs, memory=memory, numbers=numbers, sums=sums)


def _memory(stage: Stage, grad_dtype: torch.dtype) -> tuple[RowArray, ...]:
    """Return the arrays of a parameter, in the order of a kernel's table."""
    arrays = [RowArray("p", dtype_name(stage.dtype)), RowArray("g", dtype_name(grad_dtype))]
    if not stage.applies:
        arrays.append(RowArray("u", "float32"))
    for name, spec in stage.arrays.items():
        form = ("element", 1)
        if spec.scale_of is not None:
            form = ("scale", stage.width // spec.size(stage.width))
        elif spec.packed_of is not None:
            form = ("packed", 2)
        arrays.append(RowArray(name, dtype_name(spec.dtype), *form))
    return tuple(arrays)


def _second_keys(streams: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the columns of keys that are a k1, given the roles of each stream."""
    seconds, place = set(), 0
    for roles in streams:
        seconds |= set(range(place + 1, place + 1 + len(roles)))
        place += 1 + len(roles)
    return frozenset(seconds)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as a graph has it."""
    return str(dtype).removeprefix("torch.")


class _Tracer(TorchDispatchMode):
    """Writes down each operation as a node. Equal operations are one node."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._of: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # so that no id is given twice
        self._known: dict[tuple, Node] = {}

    def node(self, op: str, args: tuple, like: Tensor | tuple, axes: tuple = ()) -> Node:
        """Return the node of an operation; `like` has its shape and dtype, or is both."""
        shape, dtype = like if isinstance(like, tuple) else (tuple(like.shape), dtype_name(like.dtype))
        parts = tuple(id(x) if isinstance(x, Node) else repr(x) for x in args)
        key = (op, parts, shape, dtype, axes)
        if key not in self._known:
            self._known[key] = made = Node(op, args, shape, dtype, axes)
            self.nodes.append(made)
        return self._known[key]

    def set(self, x: Tensor, node: Node) -> None:
        """Note the node of a tensor."""
        self._of[id(x)] = node
        self._alive.append(x)

    def of(self, x: Operand) -> Operand:
        """Return the node of a tensor, or a table of its numbers if it has memory. Other objects stay."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self._of:
            self.set(x, self.node("table" if x.dim() else "const", (x.tolist(),), x))
        return self._of[id(x)]

    def __torch_dispatch__(
        self, func: Operand, types: Operand, args: Operands = (), kwargs: dict | None = None
    ) -> Operand:
        """Run an operation on tensors without memory, and note its node."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in ("_to_copy", *_COPIES) and args[0].device.type != "meta":  # of a table
            made = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
            self.set(made, self.of(args[0]))
            return made
        try:
            out = func(*(x.to("meta") if isinstance(x, Tensor) else x for x in args), **kwargs)
        except RuntimeError as error:  # as of `bool(x)` and `x.item()`, where there are no numbers
            raise NoGeneratedForm(name) from error
        if not isinstance(out, Tensor):
            raise NoGeneratedForm(name)
        in_place = (name.endswith("_") and not name.startswith("_")) or name.startswith("__i")
        node = self._node_of(name if name.startswith("_") else name.rstrip("_"), args, kwargs, out)
        if in_place:
            self._of[id(args[0])] = node
        self.set(out, node)
        return out

    def _node_of(self, name: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        """Return the node of an aten operation, given its result."""
        if name in _SAME or name in ("rsub", "reciprocal", "square", "pow"):
            return self._arithmetic(name, args, kwargs, out)
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._clamp(name, args, kwargs, out)
        if name in _FILLED or name in ("full", "full_like", "scalar_tensor", "fill"):
            return self._filled(name, args, out)
        if name in _VIEWS or name in ("slice", "select", "narrow"):
            return self._part(name, args, out)
        of: dict[str, Callable[[], Node]] = {
            "where": lambda: self.node(
                "where", (self.of(args[0]), *self._promoted(args[1:], dtype_name(out.dtype))), out
            ),
            "_to_copy": lambda: self.cast(self.of(args[0]), dtype_name(out.dtype)),
            "copy": lambda: self.cast(self.of(args[1]), dtype_name(out.dtype)),
            "_unsafe_index": lambda: self.node("take", (self.of(args[0]), *map(self.of, args[1])), out),
            "index": lambda: self.node("take", (self.of(args[0]), *map(self.of, args[1])), out),
            "constant_pad_nd": lambda: self.node("pad", (self.of(args[0]), *map(repr, args[1:])), out),
            "arange": lambda: self.node("iota", (out.shape[0],), out),
            "cat": lambda: self.node("cat", tuple(map(self.of, args[0])), out),
            "stack": lambda: self.node("stack", tuple(map(self.of, args[0])), out),
            "amax": lambda: self._reduced("amax", args, out),
            "any": lambda: self._reduced("any", args, out),
            "isfinite": lambda: self._is_finite(self.of(args[0]), out),
            **{copy: lambda: self.of(args[0]) for copy in _COPIES},
        }
        if name not in of:
            raise NoGeneratedForm(name)
        return of[name]()

    def _arithmetic(self, name: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        if kwargs.get("alpha", 1) != 1 or len(args) > 2 or kwargs.get("rounding_mode"):
            raise NoGeneratedForm(f"{name} with options")
        if name == "reciprocal":
            return self.node("div", (1.0, self.of(args[0])), out)
        if name == "square" or (name == "pow" and not isinstance(args[1], Tensor) and args[1] == 2):
            return self.node("mul", (self.of(args[0]),) * 2, out)
        if name == "pow":
            raise NoGeneratedForm(name)
        op, operands = _SAME.get(name, "sub"), args[::-1] if name == "rsub" else args
        return self.node(op, tuple(self._promoted(operands, _computed_in(op, args, out))), out)

    def _promoted(self, operands: Operands, dtype: str) -> list:
        """Return operands in the dtype that the operation computes in."""
        made = []
        for x in map(self.of, operands):
            if isinstance(x, Node):
                made.append(self.cast(x, dtype))
            else:
                made.append(float(x) if is_float(dtype) else bool(x) if dtype == "bool" else int(x))
        return made

    def _clamp(self, name: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        bounds = [*args[1:], None, None][:2] if name != "clamp_max" else [None, args[1]]
        bounds = [kwargs.get("min", bounds[0]), kwargs.get("max", bounds[1])]
        x = self.of(args[0])
        for op, bound in zip(("maximum", "minimum"), bounds, strict=True):
            if bound is not None:
                x = self.node(op, (x, *self._promoted([bound], dtype_name(out.dtype))), out)
        return x

    def _filled(self, name: str, args: Operands, out: Tensor) -> Node:
        value: Operand = _FILLED.get(name, args[0] if name == "scalar_tensor" else args[-1])
        node = self.of(value)
        value = node.args[0] if isinstance(node, Node) else value
        dtype = dtype_name(out.dtype)
        return self.node("const", (float(value) if is_float(dtype) else value,), ((), dtype))

    def _part(self, name: str, args: Operands, out: Tensor) -> Node:
        x = self.of(args[0])
        if name == "view" and isinstance(args[1], torch.dtype):
            return x if x.dtype == dtype_name(args[1]) else self.node("bitcast", (x,), out)
        if tuple(out.shape) == x.shape or x.op == "const":
            return x
        if name in _VIEWS:
            return self.node("expand" if name == "expand" else "view", (x,), out)
        axis = args[1] % len(x.shape) if len(args) > 1 else 0
        if name == "slice":
            start, stop, step = (*args[2:], None, None, None)[:3]
            stop = min(x.shape[axis] if stop is None else stop, x.shape[axis])
            return self.node("slice", (x, axis, start or 0, stop, step or 1), out)
        size = args[3] if name == "narrow" else 1
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        node = self.node("slice", (x, axis, args[2], args[2] + size, 1), (shape, x.dtype))
        return node if shape == tuple(out.shape) else self.node("view", (node,), out)

    def _reduced(self, op: str, args: Operands, out: Tensor) -> Node:
        x = self.of(args[0])
        axes = args[1] if isinstance(args[1], Sequence) else [args[1]]
        if out.dim() != len(x.shape):
            raise NoGeneratedForm(f"{op} without keepdim")
        return self.node(op, (x,), out, tuple(sorted(axis % len(x.shape) for axis in axes)))

    def _is_finite(self, x: Node, out: Tensor) -> Node:
        return self.node("lt", (self.node("abs", (x,), (x.shape, x.dtype)), math.inf), out)

    def cast(self, x: Node, dtype: str) -> Node:
        """Return a node in another dtype, without casts that change no number."""
        if x.dtype == dtype:
            return x
        if x.op == "const":
            value = float(x.args[0]) if is_float(dtype) else int(x.args[0])
            return self.node("const", (value,), (x.shape, dtype))
        if x.op == "cast":
            (inner,) = x.args
            if inner.dtype == dtype and dtype in _NARROWER.get(x.dtype, ()):  # widened, and back
                return inner
        if dtype == "float32" and x.op == "sqrt" and x.dtype == "float64":
            (inner,) = x.args  # the float64 root of a float32, rounded to float32, is the float32 root
            if inner.op == "cast" and inner.args[0].dtype == "float32":
                return self.node("sqrt", inner.args, (x.shape, "float32"))
        return self.node("cast", (x,), (x.shape, dtype))


def _computed_in(op: str, args: Operands, out: Tensor) -> str:
    """Return the dtype in which an operation computes: of a comparison, the common one of its operands."""
    if op not in _COMPARISONS:
        return dtype_name(out.dtype)
    first, second = args
    return dtype_name(torch.result_type(first, second))
