"""Array operations that each framework implements, so that arithmetic is written once for both.

All other arithmetic uses operators. Arrays are float32 or int32. In both frameworks, `>>` on int32 keeps the
sign and sums wrap, and the contract's uint32 numbers have the same patterns.
"""

from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any
"""A float32 or int32 array in either framework. It is Any because this package imports no framework."""


class Arrays(Protocol):
    """Operations on a framework's arrays, called `xp` in functions that use them."""

    def bits(self, x: Array, /) -> Array:
        """Return float32 numbers as int32 patterns."""

    def floats(self, bits: Array, /) -> Array:
        """Return int32 patterns as float32 numbers."""

    def real(self, x: Array, /) -> Array:
        """Return int32 as float32."""

    def integer(self, x: Array, /) -> Array:
        """Return float32 as int32, toward zero."""

    def wide(self, scale: Array, /) -> Array:
        """Return scale bytes as int32. XLA may keep them if a mark is compared in int32."""

    def stored(self, codes: Array, dtype: str, /) -> Array:
        """Return int32 codes in their stored dtype, or unchanged if a cast follows elsewhere."""

    def shift(self, bits: Array, by: int, /) -> Array:
        """Return patterns shifted down, with zeros above them."""

    def sign(self, x: Array, bit: int, /) -> Array:
        """Return `bit`, an 8-bit number, where float32 has a sign and is not NaN, else 0."""

    def nearest(self, x: Array, /) -> Array:
        """Return the nearest whole numbers, ties to even, in float32."""

    def where(self, mask: Array, x: Array, y: Array, /) -> Array:
        """Return x where a mask holds, else y. One of them is an array and decides the dtype."""

    def clip(self, x: Array, /, low: Array = None, high: Array = None) -> Array:
        """Return x clipped to [low, high]. The bounds are numbers or arrays."""

    def square(self, x: Array, /) -> Array:
        """Return x x."""

    def product(self, x: Array, y: Array, /) -> Array:
        """Return x y, rounded once even if a sum follows."""

    def quotient(self, x: Array, y: Array, /) -> Array:
        """Return x / y, correctly rounded."""

    def unit(self, scale: Array, /, down: int = 0) -> Array:
        """Return the power of two with exponent field `scale` - `down`, or NaN for a marked block."""

    def table_codes(self, y: Array, words: Array, table: Array, /) -> Array:
        """Round y to the codes in a table, upward from the number below y if h gap < y - number.

        h is (2 (word >> 16) + 1) / 2^17, or 1/2 without words. Values past an end get the code at that end.
        NaN gets any code.
        """

    def table_numbers(self, codes: Array, table: Array, /) -> Array:
        """Return the exact float32 numbers for codes in a table."""

    def behind(self, x: Array, /) -> "Arrays":
        """Return operations for products with `x`, in which a compiler cannot know the sign of 0."""
        ...


def dtype_name(x: object) -> str:
    """Return an array's dtype by its name in all frameworks, or the name of x's type if x is not an array."""
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
