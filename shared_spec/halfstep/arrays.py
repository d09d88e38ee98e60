"""What a framework says of its arrays, so that arithmetic is written once for both.

Operators do the rest. Arrays are float32, or int32, where `>>` keeps the sign and sums wrap: that is so in
both frameworks, and the contract's uint32 has the same patterns.
"""

from typing import Any, Protocol


class Arrays(Protocol):
    """Operations on arrays of a framework, `xp` where they are used."""

    def bits(self, x: Any, /) -> Any:
        """Return the patterns of float32, int32."""

    def floats(self, bits: Any, /) -> Any:
        """Return the float32 numbers of patterns."""

    def real(self, x: Any, /) -> Any:
        """Return int32 as float32."""

    def integer(self, x: Any, /) -> Any:
        """Return float32 as int32, toward zero."""

    def wide(self, scale: Any, /) -> Any:
        """Return scale bytes as int32. Where a mark is looked for in int32, XLA may keep them for that."""

    def stored(self, codes: Any, dtype: str, /) -> Any:
        """Return int32 in the dtype in which it is stored, or as it is, if a cast follows elsewhere."""

    def shift(self, bits: Any, by: int, /) -> Any:
        """Return patterns moved down, with zeros above them."""

    def sign(self, x: Any, bit: int, /) -> Any:
        """Return `bit`, of eight, where float32 has a sign and is no NaN, else 0."""

    def nearest(self, x: Any, /) -> Any:
        """Return the nearest whole numbers, ties to even, in float32."""

    def where(self, mask: Any, x: Any, y: Any, /) -> Any:
        """Return x where a mask holds, else y; one of them is an array, and says of what dtype."""

    def clip(self, x: Any, /, low: Any = None, high: Any = None) -> Any:
        """Return x, not below `low` and not above `high`: numbers, or arrays."""

    def square(self, x: Any, /) -> Any:
        """Return x x."""

    def product(self, x: Any, y: Any, /) -> Any:
        """Return x y, which a sum reads: rounded once all the same."""

    def quotient(self, x: Any, y: Any, /) -> Any:
        """Return x / y, correctly rounded."""

    def unit(self, scale: Any, /, down: int = 0) -> Any:
        """Return the power of two of exponent field `scale` - `down`; NaN of a marked block."""

    def table_codes(self, y: Any, words: Any, table: Any, /) -> Any:
        """Round to the codes of a table: up from the number below if h gap < y - number.

        h is (2 (word >> 16) + 1) / 2^17, or 1/2 without words. Past either end it is that end; of NaN, any.
        """

    def table_numbers(self, codes: Any, table: Any, /) -> Any:
        """Return the float32 numbers of codes of a table: exact."""

    def behind(self, x: Any, /) -> "Arrays":
        """Return the same, for products that are made of `x`, whose sign is 0 and not known to be."""
        ...
