"""Operations on a step's numbers, which protect a `Number` from a compiler before they read it.

Contract: A1 to A3.
"""

import operator
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from halfstep.arrays import Array, dtype_name
from halfstep.means import mean
from halfstep.numbers import Count, Mask, Number, Operand, Origin, ReadFromNumbers

LARGE_NORM = 2.0**100
"""Above this, numbers are multiplied by 2^-64 before their norm divides anything (contract N3, L2)."""
SCALE_BITS = 64


class Op:
    """Operations on a step's numbers. A subclass per framework implements array functions and protection.

    Attributes:
        rule: the rule's name, for messages.
        framework: module with the functions abs, sign, where, maximum, minimum, isfinite and matmul.
    """

    framework: ClassVar[ModuleType]

    def __init__(self, rule: str):
        self.rule = rule

    if not TYPE_CHECKING:  # a checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(f"{self.rule}: op has no {name}. Use op.apply(function, x).")

    # Methods that a framework implements.

    def as_scalar(self, x: object) -> Array | None:
        """Return a bare scalar as the framework's float32, or None for any other value."""
        raise NotImplementedError

    def opaque(self, x: Array) -> Array:
        """Return x as a value with an origin hidden from compilers."""
        return x

    def opaque_product(self, x: Array) -> Array:
        """Return a product that is not fused with a sum."""
        return x

    def spread(self, x: Array, like: Array) -> Array:
        """Return a scalar divisor in the dividend's shape, opaque in each element."""
        return x

    def root(self, x: Array) -> Array:
        """Return the correctly rounded root of a bare array."""
        raise NotImplementedError

    def quotient(self, x: Array, y: Array) -> Array:
        """Return the correctly rounded quotient of bare arrays."""
        raise NotImplementedError

    def norms_of(self, x: Array, exact: bool) -> Array:
        """Return the norms of x and 2^-64 x, a bare array. The second norm is finite if x is finite."""
        raise NotImplementedError

    def in_range(self, norms: Array) -> tuple[Array, Array]:
        """Return the norm of s x, and s, from the result of `norms_of(x)`."""
        raise NotImplementedError

    # Conversions and operations.

    def number(self, x: object) -> Number:
        """Return x as a Number. A bare scalar has the origin NUMBER."""
        if isinstance(x, Number):
            return x
        if isinstance(x, ReadFromNumbers):
            return x.refuse()
        scalar = None if isinstance(x, (Mask, bool)) else self.as_scalar(x)
        if scalar is None:
            kind = "a comparison" if isinstance(x, Mask) else f"a bare {type(x).__name__}"
            way = (
                "op.where(mask, x, y)"
                if isinstance(x, Mask)
                else "numbers of the step, or op.apply(function, x)"
            )
            raise TypeError(f"{self.rule}: update computes with {kind}. Use {way}.")
        return Number(scalar, Origin.NUMBER, self)

    def wrap(self, x: Array, made: Origin = Origin.ARRAY) -> Number:
        """Return the framework's bare array as a Number."""
        return Number(x, made, self)

    def bare(self, x: object) -> Array:
        """Return a Number's array, for a moment, the caller or another operation."""
        return self._term(self.number(x))

    def add(self, x: Operand, y: Operand) -> Number:
        """Return x + y."""
        a, b = self._terms(x, y, "sum")
        return self.wrap(a + b)

    def subtract(self, x: Operand, y: Operand) -> Number:
        """Return x - y."""
        a, b = self._terms(x, y, "difference")
        return self.wrap(a - b)

    def multiply(self, x: Operand, y: Operand) -> Number:
        """Return x y."""
        a, b = self._pair(x, y, "product")
        if isinstance(y, float) and y == -1:  # exact: a compiler may fuse it
            return self.wrap(a.value * b.value, a.made)
        scaled = {a.made, b.made} & {Origin.NUMBER, Origin.SCALED}
        return self.wrap(self._factor(a, b) * self._factor(b, a), Origin.SCALED if scaled else Origin.PRODUCT)

    def divide(self, x: Operand, y: Operand) -> Number:
        """Return x / y, correctly rounded."""
        a, b = self._pair(x, y, "quotient")
        above = self._opaque(a) if a.made is Origin.QUOTIENT else a.value
        # Compilers turn (x / y) / z into x / (y z), and x / sqrt(y) and array / scalar into products.
        if b.made is Origin.NUMBER or (_shape(a) and _shape(a) != _shape(b)):
            below = self.spread(b.value, a.value)
        else:
            below = self._opaque(b) if b.made in (Origin.QUOTIENT, Origin.ROOT) else b.value
        return self.wrap(self.quotient(above, below), Origin.QUOTIENT)

    def negative(self, x: Operand) -> Number:
        """Return -x, with the origin of x."""
        x = self.number(x)
        return self.wrap(-x.value, x.made)

    def sqrt(self, x: Operand) -> Number:
        """Return the root of x, correctly rounded."""
        return self.wrap(self.root(self.number(x).value), Origin.ROOT)

    def ema(self, average: Operand, value: Operand, rate: Operand) -> Number:
        """Return (rate average) + ((1 - rate) value), each operation rounded once (contract M1)."""
        raise NotImplementedError

    def abs(self, x: Operand) -> Number:
        """Return |x|."""
        return self.wrap(self.framework.abs(self.bare(x)))

    def sign(self, x: Operand) -> Number:
        """Return 1, -1, +0 for a zero of either sign, and NaN for NaN."""
        return self.wrap(self.framework.sign(self.bare(x)))

    def maximum(self, x: Operand, y: Operand) -> Number:
        """Return the larger value, or NaN where either is NaN."""
        return self.wrap(self.framework.maximum(*self._bare_pair(x, y, "maximum")))

    def minimum(self, x: Operand, y: Operand) -> Number:
        """Return the smaller value, or NaN where either is NaN."""
        return self.wrap(self.framework.minimum(*self._bare_pair(x, y, "minimum")))

    def clamp(self, x: Operand, low: Operand, high: Operand) -> Number:
        """Return minimum(maximum(x, low), high)."""
        return self.minimum(self.maximum(x, low), high)

    def where(self, mask: Mask, x: Operand, y: Operand) -> Number:
        """Return x where a comparison holds, else y."""
        return self.wrap(self.framework.where(self.truth(mask), self.bare(x), self.bare(y)))

    def isfinite(self, x: Operand) -> Mask:
        """Return where x is neither infinite nor NaN."""
        return Mask(self.framework.isfinite(self.bare(x)), self)

    def power(self, x: Operand, y: Operand) -> Number:
        """Return x^y, to within units in the last place, which may differ between frameworks and devices."""
        raise NotImplementedError

    def matmul(self, x: Operand, y: Operand) -> Number:
        """Return the matrix product in float32, with sums in the framework's own order."""
        return self.wrap(self.framework.matmul(self.bare(x), self.bare(y)))

    def mean(self, x: Operand, axis: int | None = None) -> Number:
        """Return the mean along an axis, kept with size 1, or over all elements, by halves (contract M3)."""
        return self.wrap(self.opaque(mean(self.bare(x), axis, self.framework.concatenate)))

    def norm(self, x: Operand, exact: bool = False) -> Number:
        """Return the array's Euclidean norm (contract L1), with `exact` by integer sums (N2)."""
        return self.wrap(self.norms_of(self.bare(x), exact)[0])

    def norm_in_range(self, x: Operand, exact: bool = False) -> tuple[Number, Number]:
        """Return the norm of s x, and s: 2^-64 if x is finite and its norm is above 2^100, else 1 (N3)."""
        norm, scale = self.in_range(self.norms_of(self.bare(x), exact))
        return self.wrap(norm), self.wrap(scale)

    def scaled(self, x: Operand, ratio: Operand, scale: Operand | None = None) -> Number:
        """Return ratio x, or ratio (scale x). x must not be read again, because its memory may be reused."""
        x = x if scale is None else self.multiply(scale, x)
        return self.wrap(self.opaque(self.multiply(ratio, x).value))

    def is_zero(self, field: object) -> bool:
        """Whether a field is known to be 0 when a step is built, so that its term can be left out."""
        return False

    def apply(self, function: Callable[..., Array], *xs: Operand | Mask) -> Any:  # Number, Mask or a tuple
        """Return function(*xs), computed on the framework's arrays and rounded as the framework rounds.

        Its results are float32 or truth values in any shape.
        """
        result = function(*(self.truth(x) if isinstance(x, Mask) else self.bare(x) for x in xs))
        if isinstance(result, tuple):
            return tuple(self._applied(function, x) for x in result)
        return self._applied(function, result)

    def truth(self, mask: Mask) -> Array:
        """Return the truth values of a Mask, and raise TypeError for any other value."""
        if not isinstance(mask, Mask):
            raise TypeError(
                f"{self.rule}: op.where gets a {type(mask).__name__} as its mask. "
                "Use a comparison of numbers of the step, such as x > 0."
            )
        return mask.value

    def returned(self, u: object, shape: tuple[int, ...]) -> Array:
        """Return the array in the result of `update`, after a check of its dtype and shape."""
        if not isinstance(u, Number):
            raise TypeError(f"{self.rule}: update returns a {type(u).__name__}. Return a number of the step.")
        u = self.bare(u)
        check_array(self.rule, "the update that the rule returns", u, shape)
        return u

    def compare(self, how: str, x: Operand, y: Operand) -> Mask:
        """Return a comparison, given the name of its method."""
        a, b = self.bare(x), self.bare(y)
        return Mask(getattr(operator, how)(a, b), self)

    def _applied(self, function: Callable[..., Array], x: Array) -> Number | Mask:
        dtype = dtype_name(x)
        if dtype == "bool":
            return Mask(x, self)
        if dtype != "float32":
            name = getattr(function, "__name__", "function")
            raise TypeError(
                f"{self.rule}: {name} returns {dtype} to op.apply. Return float32, or truth values."
            )
        return self.wrap(self.opaque(x))

    def _bare_pair(self, x: Operand, y: Operand, what: str) -> tuple[Array, Array]:
        return tuple(map(self.bare, self._pair(x, y, what)))  # pyright: ignore[reportReturnType]

    def _pair(self, x: Operand, y: Operand, what: str) -> tuple[Number, Number]:
        x, y = self.number(x), self.number(y)
        if x.made is Origin.NUMBER and y.made is Origin.NUMBER:
            # Frameworks differ, because eager torch computes this in float64, and compiled code in float32.
            raise TypeError(
                f"{self.rule}: update computes the {what} of two numbers of the step. "
                "Compute it in `numbers`, which runs once a step."
            )
        return x, y

    def _terms(self, x: Operand, y: Operand, what: str) -> tuple[Array, Array]:
        a, b = self._pair(x, y, what)
        return self._summand(a), self._summand(b)

    def _summand(self, x: Number) -> Array:
        # A compiler drops a constant zero, and turns (x + c) + d into x + (c + d).
        return self._opaque(x) if x.made is Origin.NUMBER else self._term(x)

    def _term(self, x: Number) -> Array:
        """Return a value for a sum. A product is protected from being fused with the sum."""
        if x.made not in (Origin.PRODUCT, Origin.SCALED):
            return x.value
        if x._protected is None:
            x._protected = self.opaque_product(x.value)
        return x._protected

    def _factor(self, x: Number, y: Number) -> Array:
        """Return x as a factor for y. A compiler turns (x c) d into x (c d) if it sees c and d."""
        gathers = x.made is Origin.SCALED and y.made in (Origin.SCALED, Origin.NUMBER)
        return self._opaque(x) if gathers else x.value

    def _opaque(self, x: Number) -> Array:
        if x._protected is None:
            x._protected = self.opaque(x.value)
        return x._protected


class NumbersOp(Op):
    """Operations on scalars and counts for a rule's `numbers`, which runs once per step."""

    def unbias(self, *pairs: tuple[Operand, Count], steps: int = 1) -> tuple[Number, ...]:
        """Return 1 / (1 - rate^t) for each pair (rate, t), and for the last pair at `steps` counts from t on.

        Contract: M2.
        """
        raise NotImplementedError

    def coming(self, field: str, steps: int) -> Number | None:
        """Return a field's values at the next steps from its schedule, or None without a schedule."""
        raise NotImplementedError

    def steps(self, steps: int) -> Number:
        """Return 1, 2, ..., `steps`."""
        return self.wrap(self.framework.arange(1, steps + 1, dtype=self.framework.float32))

    def halves(self, x: Number) -> tuple[Number, Number]:
        """Return the numbers at even and at odd positions. Two numbers are returned as scalars."""
        array = self.bare(x)
        even, odd = (array[0], array[1]) if len(array) == 2 else (array[::2], array[1::2])
        return self.wrap(even), self.wrap(odd)

    def float32(self, x: Count | Mask | bool) -> Number:
        """Return a count, or a comparison's truth value, as a number."""
        raise NotImplementedError


def _shape(x: Number) -> tuple[int, ...]:
    return tuple(getattr(x.value, "shape", ()))


def check_array(rule: str, what: str, x: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless x is a float32 array with `shape`."""
    actual = dtype_name(x), tuple(getattr(x, "shape", ()))
    if actual != ("float32", tuple(shape)):
        raise ValueError(
            f"{rule}: {what} is {actual[0]}{list(actual[1])}, expected float32{list(shape)}. "
            "Return float32 of the shape that came in."
        )
