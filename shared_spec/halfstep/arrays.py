"""The operations that a framework supplies, so that arithmetic is written once for both.

Operators do the rest. Arrays are float32, or int32, where `>>` keeps the sign and sums wrap: that is so in
both frameworks, and the contract's uint32 has the same patterns.
"""

from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any
"""An array of either framework, float32 or int32. Nothing here imports one, so no checker can know more."""


class Arrays(Protocol):
    """Operations on arrays of a framework, `xp` where they are used."""

    def bits(self, x: Array, /) -> Array:
        """Return the patterns of float32, int32."""

    def floats(self, bits: Array, /) -> Array:
        """Return the float32 numbers of patterns."""

    def real(self, x: Array, /) -> Array:
        """Return int32 as float32."""

    def integer(self, x: Array, /) -> Array:
        """Return float32 as int32, toward zero."""

    def wide(self, scale: Array, /) -> Array:
        """Return scale bytes as int32. Where a mark is looked for in int32, XLA may keep them for that."""

    def stored(self, codes: Array, dtype: str, /) -> Array:
        """Return int32 codes in their stored dtype, or unchanged if a cast follows elsewhere."""

    def shift(self, bits: Array, by: int, /) -> Array:
        """Return patterns moved down, with zeros above them."""

    def sign(self, x: Array, bit: int, /) -> Array:
        """Return `bit`, of eight, where float32 has a sign and is no NaN, else 0."""

    def nearest(self, x: Array, /) -> Array:
        """Return the nearest whole numbers, ties to even, in float32."""

    def where(self, mask: Array, x: Array, y: Array, /) -> Array:
        """Return x where a mask holds, else y. One of them is an array and decides the dtype."""

    def clip(self, x: Array, /, low: Array = None, high: Array = None) -> Array:
        """Return x, not below `low` and not above `high`: numbers, or arrays."""

    def square(self, x: Array, /) -> Array:
        """Return x x."""

    def product(self, x: Array, y: Array, /) -> Array:
        """Return x y, rounded once, although a sum reads it."""

    def quotient(self, x: Array, y: Array, /) -> Array:
        """Return x / y, correctly rounded."""

    def unit(self, scale: Array, /, down: int = 0) -> Array:
        """Return the power of two of exponent field `scale` - `down`; NaN of a marked block."""

    def table_codes(self, y: Array, words: Array, table: Array, /) -> Array:
        """Round to the codes of a table: up from the number below if h gap < y - number.

        h is (2 (word >> 16) + 1) / 2^17, or 1/2 without words. Past either end it is that end; of NaN, any.
        """

    def table_numbers(self, codes: Array, table: Array, /) -> Array:
        """Return the float32 numbers of codes of a table: exact."""

    def behind(self, x: Array, /) -> "Arrays":
        """Return operations for products made of `x`, with a sign of 0 that the compiler does not know."""
        ...


def dtype_name(x: object) -> str:
    """Return the name of an array's dtype, alike in all frameworks; the name of its type if x is no array."""
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
