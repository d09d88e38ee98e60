"""Numbers that carry the operation that made them, so that a reader can protect them from a compiler.

A compiler fuses a product with the sum that follows, gathers factors and denominators, and drops a constant
zero. A `Number` stores its origin, and the framework's `Op` protects the number only if a compiler could
change the result. Contract: A1, A2.
"""

import dataclasses
import enum
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeAlias

import numpy as np

from halfstep.arrays import Array

if TYPE_CHECKING:
    from halfstep.op import Op


class Origin(enum.Enum):
    """The operation that made an operand, if compilers treat its result in a special way."""

    ARRAY = "array"  # protected, or not changed by compilers
    NUMBER = "number"  # a scalar, perhaps a constant
    PRODUCT = "product"  # a product of arrays
    SCALED = "scaled"  # a product with a number
    QUOTIENT = "quotient"
    ROOT = "root"


def refusal(rule: str) -> str:
    """Return the message for an `update` that passes a number to a framework's function."""
    return (
        f"{rule}: update calls a function of a framework on a number of the step. "
        "Use op.<name>, such as op.sqrt(x), or op.apply(function, x)."
    )


def met_a_number(error: TypeError) -> bool:
    """Whether a framework or NumPy raised the error because it met a `Number` or `Mask`."""
    return any(word in str(error) for word in (__name__, "'Number'", "'Mask'"))


class _Guarded:
    """Base class that raises in a framework's functions, which would compute on unprotected values."""

    __slots__ = ()
    __array_ufunc__ = None  # so that NumPy scalars leave operators to the class
    _op: "Op"

    def _refuse(self) -> NoReturn:
        raise TypeError(refusal(self._op.rule))

    def __array__(self, *_: object, **__: object) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        operands = [*args, *(kwargs or {}).values()]
        nested = [x for operand in operands if isinstance(operand, (tuple, list)) for x in operand]
        next(x for x in (*operands, *nested) if isinstance(x, _Guarded))._refuse()


class Number(_Guarded):
    """Float32 values in a step, for +, -, *, / and comparisons. Every operation is rounded once.

    Attributes:
        value: the framework's array, for a debugger.
        made: the operation that made the value.
    """

    __slots__ = ("_op", "_protected", "made", "value")
    __hash__: ClassVar[None] = None

    def __init__(self, value: Array, made: Origin, op: "Op"):
        self.value, self.made, self._op, self._protected = value, made, op, None

    def __add__(self, other: "Operand") -> "Number":
        return self._op.add(self, other)

    __radd__ = __add__

    def __sub__(self, other: "Operand") -> "Number":
        return self._op.subtract(self, other)

    def __rsub__(self, other: "Operand") -> "Number":
        return self._op.subtract(other, self)

    def __mul__(self, other: "Operand") -> "Number":
        return self._op.multiply(self, other)

    def __rmul__(self, other: "Operand") -> "Number":
        return self._op.multiply(other, self)

    def __truediv__(self, other: "Operand") -> "Number":
        return self._op.divide(self, other)

    def __rtruediv__(self, other: "Operand") -> "Number":
        return self._op.divide(other, self)

    def __neg__(self) -> "Number":
        return self._op.negative(self)

    def __abs__(self) -> "Number":
        return self._op.abs(self)

    def __eq__(self, other: "Operand") -> "Mask":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._op.compare("__eq__", self, other)

    def __ne__(self, other: "Operand") -> "Mask":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._op.compare("__ne__", self, other)

    def __lt__(self, other: "Operand") -> "Mask":
        return self._op.compare("__lt__", self, other)

    def __le__(self, other: "Operand") -> "Mask":
        return self._op.compare("__le__", self, other)

    def __gt__(self, other: "Operand") -> "Mask":
        return self._op.compare("__gt__", self, other)

    def __ge__(self, other: "Operand") -> "Mask":
        return self._op.compare("__ge__", self, other)

    def __pow__(self, other: object) -> NoReturn:
        raise TypeError(f"{self._op.rule}: update uses **. Use x * x, op.sqrt(x) or op.power(x, y).")

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self._op.rule}: update branches on a number of the step. Use op.where(mask, x, y)."
        )

    if not TYPE_CHECKING:  # a checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            way = f"op.{name}(x)" if hasattr(self._op, name) else "op.apply(function, x)"
            raise AttributeError(f"{self._op.rule}: update uses .{name} of a number of the step. Use {way}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.value.shape)

    def __repr__(self) -> str:
        return f"Number({self.made.value}: {self.value!r})"


class Mask(_Guarded):
    """Truth values from a comparison, combined by &, | and ~, for `op.where`."""

    __slots__ = ("_op", "value")

    def __init__(self, value: Array, op: "Op"):
        self.value, self._op = value, op

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(self.value & other.value, self._op)

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(self.value | other.value, self._op)

    def __invert__(self) -> "Mask":
        return Mask(~self.value, self._op)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self._op.rule}: update branches on a comparison. Use op.where(mask, x, y).")


Operand: TypeAlias = Number | float | np.floating
"""Operand of an operation, which is a number or a constant from Python or NumPy."""


@dataclasses.dataclass(frozen=True)
class ReadFromNumbers:
    """Placeholder for a field that `update` may not read because its value changes. Read it at `place`."""

    rule: str
    field: str
    place: str

    def refuse(self, *_: object) -> NoReturn:
        """Raise the error that names the place."""
        raise TypeError(f"{self.rule}: update reads self.{self.field}. Use {self.place}.")

    __bool__ = __float__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = refuse


class Numbers(Protocol):
    """The numbers for a step, by name: a rule's hyperparameters and the results of its `numbers`."""

    def __getattr__(self, name: str, /) -> Number: ...


class Count(Protocol):
    """The step count in `numbers`, a number on the host or one that is known when the step runs."""

    def __add__(self, k: int, /) -> "Count": ...
    def __sub__(self, k: int, /) -> "Count": ...
    def __mod__(self, k: int, /) -> "Count": ...
    def __lt__(self, k: int, /) -> bool: ...
    def __le__(self, k: int, /) -> bool: ...
    def __gt__(self, k: int, /) -> bool: ...
    def __ge__(self, k: int, /) -> bool: ...


class LaterCount:
    """A step count in `numbers` that is known when the step runs. A comparison with an integer is a `Mask`.

    Both frameworks have a subclass, with `__add__`, `__mod__` and `_compare`.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __add__(self, k: int) -> "Count":
        raise NotImplementedError

    def _compare(self, how: Callable, k: int) -> Mask:
        raise NotImplementedError

    def __radd__(self, k: int) -> "Count":
        return self + k

    def __sub__(self, k: int) -> "Count":
        return self + -k

    def __eq__(self, k: Any) -> Any:  # a Mask
        return self._compare(operator.eq, k)

    def __ne__(self, k: Any) -> Any:  # a Mask
        return self._compare(operator.ne, k)

    def __lt__(self, k: int) -> Mask:
        return self._compare(operator.lt, k)

    def __le__(self, k: int) -> Mask:
        return self._compare(operator.le, k)

    def __gt__(self, k: int) -> Mask:
        return self._compare(operator.gt, k)

    def __ge__(self, k: int) -> Mask:
        return self._compare(operator.ge, k)
