"""Numbers that know how they were made, so that whatever reads them knows what a compiler may do to them.

A compiler fuses a product with the sum that follows, gathers factors and denominators, and drops a zero
that it sees. A `Number` remembers which operation made it; `Op`, which a framework completes, protects the
number where it is read, and only there. Contract: A1, A2.
"""

import dataclasses
import enum
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol, TypeAlias

import numpy as np

from halfstep.arrays import Array

if TYPE_CHECKING:
    from halfstep.op import Op


class Origin(enum.Enum):
    """The operation that made an operand, where it matters to a compiler."""

    ARRAY = "array"  # already protected, or nothing that a compiler changes
    NUMBER = "number"  # a scalar of the step, perhaps a constant
    PRODUCT = "product"  # of arrays
    SCALED = "scaled"  # a product with a number
    QUOTIENT = "quotient"
    ROOT = "root"


def refusal(rule: str) -> str:
    """Return what is said where `update` gives a number of the step to a function of a framework."""
    return (
        f"{rule}: update calls a function of a framework on a number of the step. "
        "Use op.<name>, such as op.sqrt(x), or op.apply(function, x)."
    )


def met_a_number(error: TypeError) -> bool:
    """Whether an error of a framework, or of NumPy, says that it knows no such type as `Number`."""
    return any(word in str(error) for word in (__name__, "'Number'", "'Mask'"))


class _Guarded:
    """What refuses the functions of frameworks: they would compute on values that nothing protects."""

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
    """float32 values of a step, under +, -, *, /, and comparisons; every operation is rounded once.

    Attributes:
        value: the framework's array, for a debugger.
        made: the operation that made it.
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

    if not TYPE_CHECKING:  # checkers know what there is

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
    """Truth values of a comparison, under &, | and ~, for `op.where`."""

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
"""What operations take: numbers of the step, and constants of Python or NumPy."""


@dataclasses.dataclass(frozen=True)
class ReadFromNumbers:
    """Stands in a field that `update` may not read, because its value changes; `place` has it."""

    rule: str
    field: str
    place: str

    def refuse(self, *_: object) -> NoReturn:
        """Raise the error that names the place."""
        raise TypeError(f"{self.rule}: update reads self.{self.field}. Use {self.place}.")

    __bool__ = __float__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = refuse


class Numbers(Protocol):
    """The numbers of a step, by name: of a rule's hyperparameters, and what its `numbers` returned."""

    def __getattr__(self, name: str, /) -> Number: ...


class Count(Protocol):
    """The count of a step in `numbers`: a number of the host, or one that is known when the step is run."""

    def __add__(self, k: int, /) -> "Count": ...
    def __sub__(self, k: int, /) -> "Count": ...
    def __mod__(self, k: int, /) -> "Count": ...
    def __lt__(self, k: int, /) -> bool: ...
    def __le__(self, k: int, /) -> bool: ...
    def __gt__(self, k: int, /) -> bool: ...
    def __ge__(self, k: int, /) -> bool: ...
