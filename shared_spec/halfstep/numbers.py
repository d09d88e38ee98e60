"""Numbers that know how they were made, so that whatever reads them knows what a compiler may do to them.

A compiler fuses a product with the sum that follows, gathers factors and denominators, and drops a zero
that it sees. A `Number` remembers which operation made it; `Op`, which a framework completes, protects the
number where it is read, and only there. Contract: A1, A2.
"""

import enum
from typing import Any, ClassVar


class Made(enum.Enum):
    """What made an operand, as far as a compiler cares."""

    ARRAY = "array"  # already protected, or nothing that a compiler changes
    NUMBER = "number"  # a scalar of the step, perhaps a constant
    PRODUCT = "product"  # of arrays
    SCALED = "scaled"  # a product with a number
    QUOTIENT = "quotient"
    ROOT = "root"


class Number:
    """float32 values of a step, under +, -, *, /, and comparisons; every operation is rounded once.

    Attributes:
        value: the framework's array, for a debugger.
        made: the operation that made it.
    """

    __slots__ = ("_op", "_protected", "made", "value")
    __array_ufunc__ = None  # so that NumPy scalars leave operators to this class
    __hash__: ClassVar[Any] = None

    def __init__(self, value: Any, made: Made, op: "Op"):
        self.value, self.made, self._op, self._protected = value, made, op, None

    def __add__(self, other: Any) -> "Number":
        return self._op.add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Number":
        return self._op.subtract(self, other)

    def __rsub__(self, other: Any) -> "Number":
        return self._op.subtract(other, self)

    def __mul__(self, other: Any) -> "Number":
        return self._op.multiply(self, other)

    def __rmul__(self, other: Any) -> "Number":
        return self._op.multiply(other, self)

    def __truediv__(self, other: Any) -> "Number":
        return self._op.divide(self, other)

    def __rtruediv__(self, other: Any) -> "Number":
        return self._op.divide(other, self)

    def __neg__(self) -> "Number":
        return self._op.negative(self)

    def __abs__(self) -> "Number":
        return self._op.abs(self)

    def __eq__(self, other: Any) -> "Mask":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._op.compare("__eq__", self, other)

    def __ne__(self, other: Any) -> "Mask":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._op.compare("__ne__", self, other)

    def __lt__(self, other: Any) -> "Mask":
        return self._op.compare("__lt__", self, other)

    def __le__(self, other: Any) -> "Mask":
        return self._op.compare("__le__", self, other)

    def __gt__(self, other: Any) -> "Mask":
        return self._op.compare("__gt__", self, other)

    def __ge__(self, other: Any) -> "Mask":
        return self._op.compare("__ge__", self, other)

    def __pow__(self, other: Any) -> "Number":
        raise TypeError(f"{self._op.rule}: update uses **. Use x * x, op.sqrt(x) or op.power(x, y).")

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self._op.rule}: update branches on a number of the step. Use op.where(mask, x, y)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        way = f"op.{name}(x)" if hasattr(Op, name) else "op.apply(function, x)"
        raise AttributeError(f"{self._op.rule}: update uses .{name} of a number of the step. Use {way}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.value.shape)

    def __repr__(self) -> str:
        return f"Number({self.made.value}: {self.value!r})"


class Mask:
    """Truth values of a comparison, under &, | and ~, for `op.where`."""

    __slots__ = ("_op", "value")
    __array_ufunc__ = None

    def __init__(self, value: Any, op: "Op"):
        self.value, self._op = value, op

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(self.value & other.value, self._op)

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(self.value | other.value, self._op)

    def __invert__(self) -> "Mask":
        return Mask(~self.value, self._op)

    def __bool__(self) -> bool:
        raise TypeError(f"{self._op.rule}: update branches on a comparison. Use op.where(mask, x, y).")


class Op:
    """Operations on the numbers of a step. A framework completes it: what its arrays do, what protects them.

    Attributes:
        rule: the name of the rule, for messages.
    """

    def __init__(self, rule: str):
        self.rule = rule

    # What a framework says.

    def as_operand(self, x: Any) -> Any:
        """Return a bare scalar as the framework's float32; raise TypeError for anything else."""
        raise NotImplementedError

    def opaque(self, x: Any) -> Any:
        """Return x as a value whose origin no compiler sees."""
        return x

    def opaque_product(self, x: Any) -> Any:
        """Return a product that a sum may read."""
        return x

    def spread(self, x: Any, like: Any) -> Any:
        """Return a scalar divisor in the shape of the dividend, opaque in each element."""
        return x

    def root(self, x: Any) -> Any:
        """Return the correctly rounded root of a bare array."""
        raise NotImplementedError

    def quotient(self, x: Any, y: Any) -> Any:
        """Return the correctly rounded quotient of bare arrays."""
        raise NotImplementedError

    # What reads what.

    def number(self, x: Any) -> Number:
        """Return x as a Number: a bare scalar counts as a number of the step."""
        return x if isinstance(x, Number) else Number(self.as_operand(x), Made.NUMBER, self)

    def wrap(self, x: Any, made: Made = Made.ARRAY) -> Number:
        """Return a bare array of the framework as a Number."""
        return Number(x, made, self)

    def bare(self, x: Any) -> Any:
        """Return the array of a Number for any reader: a moment, the caller, another operation."""
        return self._term(self.number(x))

    def add(self, x: Any, y: Any) -> Number:
        """Return x + y."""
        a, b = self._terms(x, y, "sum")
        return self.wrap(a + b)

    def subtract(self, x: Any, y: Any) -> Number:
        """Return x - y."""
        a, b = self._terms(x, y, "difference")
        return self.wrap(a - b)

    def multiply(self, x: Any, y: Any) -> Number:
        """Return x y."""
        a, b = self._pair(x, y, "product")
        scaled = Made.NUMBER in (a.made, b.made) or Made.SCALED in (a.made, b.made)
        return self.wrap(self._factor(a, b) * self._factor(b, a), Made.SCALED if scaled else Made.PRODUCT)

    def divide(self, x: Any, y: Any) -> Number:
        """Return x / y, correctly rounded."""
        a, b = self._pair(x, y, "quotient")
        above = self._opaque(a) if a.made is Made.QUOTIENT else a.value
        # (x / y) / z becomes x / (y z); x / sqrt(y) and a quotient by one number for all become products.
        if getattr(b.value, "shape", ()) != getattr(a.value, "shape", ()):
            below = self.spread(b.value, a.value)
        else:
            below = self._opaque(b) if b.made in (Made.QUOTIENT, Made.ROOT) else b.value
        return self.wrap(self.quotient(above, below), Made.QUOTIENT)

    def negative(self, x: Any) -> Number:
        """Return -x, made as x was."""
        x = self.number(x)
        return self.wrap(-x.value, x.made)

    def sqrt(self, x: Any) -> Number:
        """Return the root of x, correctly rounded."""
        return self.wrap(self.root(self.number(x).value), Made.ROOT)

    def compare(self, how: str, x: Any, y: Any) -> Mask:
        """Return a comparison, by the name of its method."""
        a, b = self.bare(x), self.bare(y)
        return Mask(getattr(a, how)(b), self)

    def _pair(self, x: Any, y: Any, what: str) -> tuple[Number, Number]:
        x, y = self.number(x), self.number(y)
        if x.made is Made.NUMBER and y.made is Made.NUMBER:
            # Frameworks disagree on it: eager torch would compute in float64, compiled code in float32.
            raise TypeError(
                f"{self.rule}: update computes the {what} of two numbers of the step. "
                "Compute it in `numbers`, which runs once a step."
            )
        return x, y

    def _terms(self, x: Any, y: Any, what: str) -> tuple[Any, Any]:
        a, b = self._pair(x, y, what)
        return self._summand(a), self._summand(b)

    def _summand(self, x: Number) -> Any:
        # A zero that is seen vanishes, and (x + c) + d becomes x + (c + d).
        return self._opaque(x) if x.made is Made.NUMBER else self._term(x)

    def _term(self, x: Number) -> Any:
        """Return a value that a sum may read: a product is kept from being fused with it."""
        if x.made not in (Made.PRODUCT, Made.SCALED):
            return x.value
        if x._protected is None:
            x._protected = self.opaque_product(x.value)
        return x._protected

    def _factor(self, x: Number, y: Number) -> Any:
        """Return x as a factor beside y: (x c) d becomes x (c d) where a compiler sees c and d."""
        gathers = x.made is Made.SCALED and y.made in (Made.SCALED, Made.NUMBER)
        return self._opaque(x) if gathers else x.value

    def _opaque(self, x: Number) -> Any:
        if x._protected is None:
            x._protected = self.opaque(x.value)
        return x._protected
