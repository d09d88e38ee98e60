"""The base of all kinds of codes: limits, scales, and the marking of NaN.

Contract: F3 to F5. The kinds stand in files of their own, and a framework gives the arrays (`Arrays`).
Which elements share a scale is not known here.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from halfstep.arrays import Array, Arrays
from halfstep.float_formats import FloatFormat

NAN_SCALE = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """A kind of codes. In arithmetic, codes and words are int32, and scales bytes or int32.

    Attributes:
        dtype: of their arrays, named as in ml_dtypes.
        numbers: their values: a `FloatFormat`, `UnsignedFloat`, `UnsignedRoot`, `ShiftedFloat` or
            `Table`; None: float32.
        half_gap: half the largest relative gap between codes, above the subnormal range (F3); 0 for float32.
        signed: whether negative values can be stored. for_second_moments: whether small positive numbers are
        held well enough beside large numbers. packed: whether codes are of 4 bits, two of them kept in a
        byte; they are packed by who calls. nan_in_scale: whether a NaN marks its block, since there is no
        code for it. nan_code: the code of NaN, which codes without a scale are marked with; None: as they are
        rounded. dithered: whether one word serves a block, and is asked for again by `decode`. scale_range:
        the lowest and the highest scale byte: no decoded value is subnormal in float32. carry: the number
        that takes the pattern of a maximum past the largest code to the next exponent field.
        step: the number added to that field to make the scale byte.
        exponent: of the largest code: under the scale byte s the code of 1 stands for 2^(s - 127 - exponent).
    """

    dtype: str
    numbers: Any  # of each family its own, as `FloatFormat` and `Table`
    half_gap: float
    signed: bool = True
    for_second_moments: bool = True
    packed: bool = False
    nan_in_scale: bool = False
    nan_code: int | None = None
    dithered: bool = False
    scale_range: tuple[int, int] = (0, 0)
    carry: int = 0
    step: int = 0
    exponent: int = 0

    has_inverse_root = False
    """Whether rounding a second moment also makes the reciprocal of its root (contract F17)."""
    power_unit = False
    """Whether they stand for multiples of a power of two that such a second moment gives (F18)."""

    def scale(self, xp: Arrays, block_max: Array) -> Array:
        """Return the scale bytes of blocks with the largest magnitudes `block_max`, infinite ones marked."""
        byte = xp.stored(self.scale_byte(xp, block_max), "uint8")
        return xp.where(block_max < math.inf, byte, NAN_SCALE) if self.nan_in_scale else byte

    def scale_byte(self, xp: Arrays, block_max: Array) -> Array:
        """Return the exponent field of the smallest power of two under which finite blocks fit."""
        bits = xp.bits(block_max)
        field = (bits + self.carry if self.carry else bits) >> 23
        return xp.clip(field + self.step if self.step else field, *self.scale_range)

    def encode(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the codes of float32, and mark infinities and NaN.

        Args:
            xp: of the framework.
            x: float32.
            scale: the byte of every element, or of a shape that broadcasts; None in codes without.
            words: for stochastic rounding; None for nearest, ties to even.
            nonzero: where other numbers are not stored as zero: of all elements, or of each.
        """
        return self.marked(xp, x, scale, self.rounded(xp, x, scale, words, nonzero))

    def with_inverse_root(self, xp: Arrays, x: Array, words: Array) -> tuple[Array, Array]:
        """Return the codes of `encode`, and about 1/sqrt(x), where codes have inverse roots."""
        raise NotImplementedError

    def marked(self, xp: Arrays, x: Array, scale: Array, codes: Array) -> Array:
        """Return codes as they are stored. The last operation is a select, which XLA on CPU keeps."""
        codes = xp.stored(codes, self.dtype)
        if scale is not None and self.nan_in_scale:
            return xp.where(scale == NAN_SCALE, 0, codes)
        if self.nan_code is None:
            return codes
        return xp.where((abs(x) if self.signed else x) < math.inf, codes, self.nan_code)

    def rounded(self, xp: Arrays, x: Array, scale: Array, words: Array, nonzero: Array) -> Array:
        """Return the codes of `encode`, right for finite numbers."""
        raise NotImplementedError

    def decode(self, xp: Arrays, codes: Array, scale: Array, words: Array = None) -> Array:
        """Return the float32 values of codes: exact; `words`: with which dithered codes were made."""
        values = self.values(xp, codes, scale, words)
        marks = scale is None and self.nan_code is not None
        return xp.where(codes == self.nan_code, math.nan, values) if marks else values

    def values(self, xp: Arrays, codes: Array, scale: Array, words: Array) -> Array:
        """Return the values of `decode`, right for codes that `nan_code` does not mark."""
        raise NotImplementedError


def carry_past(largest: float) -> int:
    """Return the number that raises a pattern, so that mantissas above that of `largest` carry."""
    return 0x7FFFFF - (int(np.float32(largest).view(np.uint32)) & 0x7FFFFF)


def scales_of(fmt: FloatFormat) -> dict[str, Any]:  # arguments of `Codes`
    """Return the arguments that make scales of powers of two, given the numbers of the codes."""
    # From the byte under which the smallest code would decode to a subnormal float32.
    exponent = math.frexp(fmt.max)[1] - 1
    lowest = exponent - math.frexp(fmt.smallest)[1] + 2
    return {"scale_range": (lowest, 254), "carry": carry_past(fmt.max), "exponent": exponent}
