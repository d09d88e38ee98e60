"""A weight of 16 bits and 8 or 16 further bits: together a number of a wider format.

Contract: P5. The wider format is that of the weight with k more bits of mantissa: bfloat16 with 16 more is
float32 itself. The weight is the number rounded to nearest, ties away from zero: ties to even would give an
even weight 2^16 + 1 numbers to tell apart by 16 bits.
"""

import dataclasses
import math

from halfstep.arrays import Array, Arrays
from halfstep.float_formats import FLOAT_FORMATS
from halfstep.rounding import cut, whole

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


@dataclasses.dataclass(frozen=True)
class SplitWeight:
    """The bits of a 16-bit weight and its further bits, 8 or 16."""

    dtype: str
    extra_bits: int

    @staticmethod
    def check(extra_bits: object) -> None:
        """Refuse another number of further bits than 8 and 16."""
        if isinstance(extra_bits, bool) or extra_bits not in (8, 16):
            raise ValueError(
                f"split_params: extra_bits={extra_bits!r} is not 8 or 16. "
                "Use 16 for all of float32, 8 for 24 bits in all."
            )

    @property
    def rounds(self) -> bool:
        """Whether there are float32 weights that both parts together cannot hold."""
        return not (self._is_cut and self.extra_bits == 16)

    @property
    def _is_cut(self) -> bool:
        """Whether float32's pattern, cut, is that of the wider format."""
        return self.dtype == "bfloat16"

    @property
    def _lowest(self) -> int:
        """The lowest pattern that takes further bits. A zero bfloat16 has subnormal ones in float32."""
        return 1 if self._is_cut else 0

    @property
    def _mantissa_bits(self) -> int:
        return FLOAT_FORMATS[self.dtype].mantissa_bits + self.extra_bits

    def join(self, xp: Arrays, pattern: Array, extra: Array) -> Array:
        """Return the float32 weights; of float16 and 16 bits, the nearest.

        Bits that make no number with a weight, as beside one that was set to zero, are ignored (contract P7).

        Args:
            xp: of the framework.
            pattern: of the weights: int32, of which 16 bits are read.
            extra: the further bits, int32, from zero up.
        """
        k = self.extra_bits
        # As a signed number: a weight that was rounded up is too far from zero, and the top bit says so.
        base, further = (pattern & 0x7FFF) << k, (extra << (32 - k)) >> (32 - k)
        code = base + further
        # Outside at a zero that was rounded up, an infinity that was not, NaN, and what is below the smallest
        # bfloat16. The bits beside such a weight are of the one that was there before.
        inside = xp.where(code < self._infinity, code, base)
        code = xp.where(code >= self._lowest << k, inside, base)
        value = code << (16 - k) if self._is_cut else xp.bits(self._value(xp, code))
        return xp.floats(value | ((pattern << 16) & ~_MAGNITUDE))

    def split(self, xp: Arrays, w: Array, words: Array) -> tuple[Array, Array]:
        """Return the patterns of the weights, int32, and the further bits, as they are stored, of float32.

        Rounds to the wider format, by `words` or to nearest, ties to even; then the weight to nearest, ties
        away from zero.
        """
        k, bits = self.extra_bits, xp.bits(w)
        magnitude = bits & _MAGNITUDE
        if self._is_cut:
            code = magnitude if k == 16 else cut(xp, magnitude, words, 8)
        else:
            code = self._code(xp, magnitude, words)
        # Infinity is rounded to itself.
        code = xp.where(magnitude > _INFINITY, self._infinity | (1 << (self._mantissa_bits - 1)), code)
        low = xp.stored(code & ((1 << k) - 1), f"uint{k}")
        # Read from the stored array: XLA on TPU fuses a result that reads another, not two that read a third.
        return ((code >> k) + (xp.wide(low) >> (k - 1))) | ((bits >> 16) & 0x8000), low

    @property
    def _infinity(self) -> int:
        return (0x7FFFFFFF >> (16 - self.extra_bits)) >> self._mantissa_bits << self._mantissa_bits

    # float16 and its wider kin have 5 bits of exponent.

    def _code(self, xp: Arrays, magnitude: Array, words: Array) -> Array:
        """Round patterns of float32 to patterns of the wider format, infinity past its range."""
        m = self._mantissa_bits
        # As `FloatFormat` codes are rounded: below 2^-14 they count multiples of the smallest number.
        normal = xp.clip(magnitude, low=112 << 23, high=(112 + 31) << 23)
        normal = (normal - (112 << 23)) << 3 if m == 26 else cut(xp, normal, words, 5) - (112 << m)
        multiples = xp.floats(xp.clip(magnitude, high=113 << 23)) * 2.0 ** (14 + m)
        return xp.clip(normal, low=whole(xp, multiples, words))

    def _value(self, xp: Arrays, code: Array) -> Array:
        """Return the float32 numbers of patterns of the wider format: of 26 bits, the nearest."""
        m = self._mantissa_bits
        field, mantissa = code >> m, code & ((1 << m) - 1)
        # The conversion rounds, once; the product is exact.
        significand = xp.real(xp.where(field > 0, mantissa | (1 << m), mantissa))
        value = significand * xp.floats((xp.clip(field, low=1) + (112 - m)) << 23)
        value = xp.where(code == self._infinity, math.inf, value)
        return xp.where(code > self._infinity, math.nan, value)
