"""Recording of each PyTorch function that a rule calls as a node of a graph (names in `torch_names.py`)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep.kernels.graph import Node, NoGeneratedForm, is_float
from halfstep_torch.engine.kernels.torch_names import (
    CASTS,
    COMPARISONS,
    COMPOSED,
    COPIES,
    EXPANDING,
    FILLED,
    REVERSED,
    SAME,
    VIEWS,
    is_in_place,
    name_of,
)

_NARROWER = {
    "float32": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "float64": ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "int16": ("uint8", "int8"),
    "int32": ("uint8", "int8", "int16"),
    "int64": ("uint8", "int8", "int16", "int32"),
}
"""Dtypes that convert exactly to each dtype."""


Operand = Any
"""Tensor, number, dtype or list of them, as PyTorch's functions accept."""
Operands = Sequence[Operand]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a graph."""
    return str(dtype).removeprefix("torch.")


class Tracer(TorchFunctionMode):
    """A mode that records each operation as a node. Equal operations are one node."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._of: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # so that no id is reused
        self._known: dict[tuple, Node] = {}

    def node(self, op: str, args: tuple, like: Tensor | tuple, axes: tuple = ()) -> Node:
        """Return the node of an operation. `like` has its shape and dtype, or is the pair."""
        shape, dtype = like if isinstance(like, tuple) else (tuple(like.shape), dtype_name(like.dtype))
        parts = tuple(id(x) if isinstance(x, Node) else repr(x) for x in args)
        key = (op, parts, shape, dtype, axes)
        if key not in self._known:
            self._known[key] = made = Node(op, args, shape, dtype, axes)
            self.nodes.append(made)
        return self._known[key]

    def set(self, x: Tensor, node: Node) -> None:
        """Record the node of a tensor."""
        self._of[id(x)] = node
        self._alive.append(x)

    def of(self, x: Operand) -> Operand:
        """Return the node of a tensor, a table of numbers if it has memory, or another object unchanged."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self._of:
            if x.dim() > 1:
                raise NoGeneratedForm("a matrix of numbers")
            self.set(x, self.node("table" if x.dim() else "const", (x.tolist(),), x))
        return self._of[id(x)]

    def __torch_function__(
        self, func: Operand, types: Operand, args: Operands = (), kwargs: dict | None = None
    ) -> Operand:
        """Run a function on tensors without memory, and record the node of its result."""
        kwargs, name = kwargs or {}, name_of(func)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        try:
            if func.__name__ != "__get__" and any(x.device.type == "meta" for x in given):
                out = func(*map(_bare, args), **{key: _bare(x) for key, x in kwargs.items()})
            else:
                out = func(*args, **kwargs)
        except RuntimeError as error:  # as from `bool(x)` and `x.item()`, which need numbers
            raise NoGeneratedForm(name.strip("_")) from error
        if not isinstance(out, Tensor):
            parts = out if isinstance(out, Sequence) else [out]
            if given and any(x is None or isinstance(x, Tensor) for x in parts):  # as for x[i] = y and split
                raise NoGeneratedForm(name.strip("_"))
            return out
        if out.device.type != "meta":  # computed from numbers only
            return out
        try:
            node = self._node_of(name, args, kwargs, out)
        except (IndexError, TypeError) as error:  # an argument was passed by keyword
            raise NoGeneratedForm(f"{name.strip('_')} with options") from error
        if is_in_place(func):
            self._of[id(args[0])] = node
        self.set(out, node)
        return out

    def _node_of(self, name: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        """Return the node of a function, given its result."""
        if name in SAME or name in REVERSED or name in COMPOSED:
            return self._arithmetic(name, args, kwargs, out)
        if name in CASTS or name in COPIES:
            return self.cast(self.of(args[0]), dtype_name(out.dtype))
        if name in FILLED:
            return self._filled(name, args, kwargs, out)
        if name in VIEWS:
            return self._view(name, (*args, *kwargs.values()), out)
        if name in ("clamp", "clip", "clamp_min", "clamp_max"):
            return self._clamp(name, args, kwargs, out)
        of: dict[str, Callable[[], Node]] = {
            "where": lambda: self._where(*args, out=out),
            "where of a tensor": lambda: self._where(args[1], args[0], args[2], out=out),
            "copy": lambda: self.cast(self.of(args[1]), dtype_name(out.dtype)),
            "tensor": lambda: self.of(torch.tensor(args[0], dtype=out.dtype, device="cpu")),
            "__getitem__": lambda: self._item(self.of(args[0]), args[1], out),
            "narrow": lambda: self._narrow(self.of(args[0]), *args[1:]),
            "select": lambda: self._item(self.of(args[0]), (*[slice(None)] * args[1], args[2]), out),
            "pad": lambda: self.node("pad", (self.of(args[0]), *map(repr, args[1:])), out),
            "arange": lambda: self.node("iota", (out.shape[0],), out),
            "cat": lambda: self.node("cat", tuple(map(self.of, args[0])), out),
            "stack": lambda: self.node("stack", tuple(map(self.of, args[0])), out),
            "max": lambda: self._arithmetic("maximum", (args[0], args[1]), kwargs, out),
            "min": lambda: self._arithmetic("minimum", (args[0], args[1]), kwargs, out),
            "amax": lambda: self._reduced("amax", args, kwargs, out),
            "any": lambda: self._reduced("any", args, kwargs, out),
            "isfinite": lambda: self._is_finite(self.of(args[0]), out),
        }
        if name not in of:
            raise NoGeneratedForm(name.strip("_"))
        return of[name]()

    def _arithmetic(self, name: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        args = [*args, *(kwargs[key] for key in ("other", "exponent") if key in kwargs)]
        options = kwargs.keys() - {"other", "exponent"} - ({"alpha"} if kwargs.get("alpha") == 1 else set())
        if len(args) > 2 or options:
            raise NoGeneratedForm(f"{name.strip('_')} with options")
        dtype = dtype_name(out.dtype)
        if name in ("reciprocal", "__rdiv__"):  # a number over x is the product with the reciprocal
            inverse = self.node("div", (1.0, *self._promoted(args[:1], dtype)), out)
            return self.node("mul", (inverse, *self._promoted(args[1:], dtype)), out) if args[1:] else inverse
        if name in ("square", "pow", "__pow__"):
            if args[1:] and (isinstance(args[1], Tensor) or args[1] != 2):
                raise NoGeneratedForm("pow")
            return self.node("mul", (self.of(args[0]),) * 2, out)
        op, operands = (REVERSED[name], args[::-1]) if name in REVERSED else (SAME[name], args)
        return self.node(op, tuple(self._promoted(operands, _computed_in(op, args, out))), out)

    def _where(self, condition: Operand, *values: Operand, out: Tensor) -> Node:
        dtype, made = dtype_name(out.dtype), [self.of(condition)]
        for x in self._promoted(values, dtype):
            made.append(x if isinstance(x, Node) else self.node("const", (x,), ((), dtype)))
        return self.node("where", tuple(made), out)

    def _promoted(self, operands: Operands, dtype: str) -> list:
        """Return operands in the dtype in which the operation computes."""
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

    def _filled(self, name: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        value, dtype = FILLED[name], dtype_name(out.dtype)
        if value is None:
            value = next((kwargs[key] for key in ("fill_value", "value") if key in kwargs), args[-1])
        if isinstance(value, Tensor):
            if (node := self.of(value)).op != "const":
                return self.node("expand", (self.cast(node, dtype),), out)
            value = node.args[0]
        return self.node("const", (float(value) if is_float(dtype) else value,), ((), dtype))

    def _view(self, name: str, args: Operands, out: Tensor) -> Node:
        x = self.of(args[0])
        if name == "view" and isinstance(args[1], torch.dtype):
            return x if x.dtype == dtype_name(args[1]) else self.node("bitcast", (x,), out)
        if tuple(out.shape) == x.shape or x.op == "const":
            return x
        return self.node("expand" if name in EXPANDING else "view", (x,), out)

    def _item(self, x: Node, index: Operand, out: Tensor) -> Node:
        """Return the node of x[index], for entries of a table, or slices along one axis after another."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, Tensor) for part in parts):
            return self.node("take", (x, *map(self.of, parts)), out)
        if x.op == "const":
            return x
        axis, axes = 0, sum(part is not None and part is not ... for part in parts)
        for part in parts:
            if part is ...:
                axis += len(x.shape) - axes
            elif isinstance(part, slice):
                x, axis = self._slice(x, axis, *part.indices(x.shape[axis])), axis + 1
            elif type(part) is int:  # its axis is removed at the end
                x, axis = self._narrow(x, axis, part, 1), axis + 1
            elif part is not None:
                raise NoGeneratedForm("getitem with such indices")
        return x if x.shape == tuple(out.shape) else self.node("view", (x,), out)

    def _narrow(self, x: Node, axis: int, start: int, length: int) -> Node:
        axis %= len(x.shape)
        start %= x.shape[axis]
        return self._slice(x, axis, start, start + length, 1)

    def _slice(self, x: Node, axis: int, start: int, stop: int, step: int) -> Node:
        shape = (*x.shape[:axis], len(range(start, stop, step)), *x.shape[axis + 1 :])
        return x if shape == x.shape else self.node("slice", (x, axis, start, stop, step), (shape, x.dtype))

    def _reduced(self, op: str, args: Operands, kwargs: dict, out: Tensor) -> Node:
        x, axes = self.of(args[0]), kwargs["dim"] if "dim" in kwargs else args[1]
        if out.dim() != len(x.shape):
            raise NoGeneratedForm(f"{op} without keepdim")
        axes = axes if isinstance(axes, Sequence) else [axes]
        return self.node(op, (x,), out, tuple(sorted(axis % len(x.shape) for axis in axes)))

    def _is_finite(self, x: Node, out: Tensor) -> Node:
        return self.node("lt", (self.node("abs", (x,), (x.shape, x.dtype)), math.inf), out)

    def cast(self, x: Node, dtype: str) -> Node:
        """Return a node in another dtype, omitting casts that change no number."""
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
    """Return the dtype in which an operation computes, for a comparison its operands' common dtype."""
    if op not in COMPARISONS:
        return dtype_name(out.dtype)
    first, second = args
    return dtype_name(torch.result_type(first, second))


def _bare(x: Operand) -> Operand:
    """Return a tensor without its memory, or another object unchanged."""
    return x.to("meta") if isinstance(x, Tensor) else x
