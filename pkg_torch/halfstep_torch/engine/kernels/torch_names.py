"""The names of PyTorch's functions and tensor methods that have a form in a graph.

Names of in-place methods have no last `_`. Operators have the names of their methods: `x += y` is `__iadd__`.
"""

import re
from typing import Any

from torch import Tensor


def _by_name(groups: dict[Any, str]) -> dict[str, Any]:  # the values of a table have one type
    return {name: value for value, names in groups.items() for name in names.split()}


SAME = _by_name(
    {
        "and": "bitwise_and logical_and __and__ __rand__ __iand__",
        "or": "bitwise_or logical_or __or__ __ror__ __ior__",
        "xor": "bitwise_xor logical_xor __xor__ __rxor__ __ixor__",
        "not": "bitwise_not logical_not __invert__",
        "shl": "bitwise_left_shift __lshift__ __ilshift__",
        "shr": "bitwise_right_shift __rshift__ __irshift__",
        "add": "add __add__ __radd__ __iadd__",
        "sub": "sub subtract __sub__ __isub__",
        "mul": "mul multiply __mul__ __rmul__ __imul__",
        "div": "div divide true_divide __truediv__ __itruediv__ __div__ __idiv__",
        "neg": "neg negative __neg__",
        "abs": "abs absolute __abs__",
        "sqrt": "sqrt",
        "sign": "sign",
        "floor": "floor",
        "round": "round",
        "minimum": "minimum",
        "maximum": "maximum",
        "eq": "eq __eq__",
        "ne": "ne not_equal __ne__",
        "lt": "lt less __lt__",
        "le": "le less_equal __le__",
        "gt": "gt greater __gt__",
        "ge": "ge greater_equal __ge__",
    }
)
"""Operation of a graph that computes the same, by name."""
REVERSED = {"rsub": "sub", "__rsub__": "sub"}
"""Operation of a graph with exchanged operands, by name."""
COMPOSED = ("__rdiv__", "reciprocal", "square", "pow", "__pow__")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
EXPANDING = ("expand", "expand_as", "broadcast_to")
VIEWS = ("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unsqueeze", "squeeze", *EXPANDING)
COPIES = ("clone", "contiguous", "detach", "data", "requires_grad")
CASTS = tuple("to type type_as float double half bfloat16 bool byte char short int long".split())
FILLED = _by_name(
    {
        0: "zeros zeros_like new_zeros zero empty empty_like new_empty",
        1: "ones ones_like new_ones",
        None: "full full_like new_full fill",
    }
)
"""Number with which a tensor is filled, by name, or None for the last argument."""

_IN_PLACE = re.compile(r"[^_].*_|__i(?!n)\w+__")


def name_of(function: Any) -> str:  # functions of C have no common type
    """Return the name of a function, a method, or a property."""
    if function is Tensor.where:  # its operands have another order than in torch.where
        return "where of a tensor"
    name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
    return name if name.startswith("_") else name.rstrip("_")


def is_in_place(function: Any) -> bool:  # as in `name_of`
    """Whether a method writes to its tensor."""
    return bool(_IN_PLACE.fullmatch(function.__name__))
