"""Second moments kept as their fourth roots, and first moments in units of a power of two beside them.

Contract: F17, F18. A fourth root that is rounded linearly keeps the mean of nu^(1/4), which a step needs
(F6). Its reciprocal comes out of three steps of Newton's: multiplications and a subtraction, no root, no
quotient.
"""

import math

import torch
from torch import Tensor

from halfstep.storage.fourth_roots import DROP, EXPONENT, FIRST_GUESS, UNIT_BASE
from halfstep_torch.numbers.rounding import draw
from halfstep_torch.storage.base_codes import Codes

_SIGNED_UNIT_BASE = UNIT_BASE - (1 << 32) if UNIT_BASE >> 31 else UNIT_BASE


class FourthRootCodes(Codes):
    """Floats of four exponent and four mantissa bits: the fourth roots of what is stored. 255 is NaN."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the codes of fourth roots."""
        y = inverse_fourth_root(x)
        bits = ((x * y) * y.square()).view(torch.int32)
        return self._rounded(x, bits.clamp(min=self.numbers.base << DROP), words)

    def with_inverse_root(self, x: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the codes of `encode`, and about 1/sqrt(x) of x as it is.

        Args:
            x: float32, above the smallest number by more than the error of its root.
            words: int32, or None for nearest, ties to even.
        """
        y = inverse_fourth_root(x)
        s = y.square()
        return self._rounded(x, ((x * y) * s).view(torch.int32), words), s

    def _rounded(self, x: Tensor, bits: Tensor, words: Tensor | None) -> Tensor:
        bits = bits.clamp(max=(self.numbers.base + self.numbers.last) << DROP)
        return torch.where(x < math.inf, _cut(bits, words) - self.numbers.base, 255)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the fourth powers: exact, since five bits to the fourth are twenty."""
        root = ((wide + self.numbers.base) << DROP).view(torch.float32)
        return torch.where(wide == 255, math.nan, root.square().square())


class MuLawCodes(Codes):
    """A sign and 128 magnitudes: floats of three exponent and four mantissa bits, less 1/16."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the codes; NaN has the largest magnitude, and no sign."""
        bits = (x.abs() + self.numbers.offset).view(torch.int32)
        code = _cut(bits.clamp(max=(self.numbers.base + self.numbers.last) << DROP), words)
        signed = x.view(torch.int32)
        # The sum passes the sign on up to infinity, and of no NaN.
        return (code - self.numbers.base) | (((signed & (signed + 0x7FFFFF)) >> 24) & 128)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers: exact."""
        magnitude = (((wide & 127) + self.numbers.base) << DROP).view(torch.float32) - self.numbers.offset
        return (magnitude.view(torch.int32) | ((wide & 128) << 24)).view(torch.float32)


def inverse_fourth_root(v: Tensor) -> Tensor:
    """Return y, about v^(-1/4): three times y <- y (5/4 - ((v/4) y^2) y^2), each operation rounded once.

    Args:
        v: float32, not negative. Of infinity y is infinite or NaN.

    Example:
        >>> inverse_fourth_root(torch.tensor([16.0]))
        tensor([0.5000])
    """
    quarter = v * 0.25
    y = (FIRST_GUESS - (v.view(torch.int32) >> 2)).view(torch.float32)
    for _ in range(3):
        square = y.square()  # y * y would let the compiler evaluate y twice, and so on in each step
        y = y * (1.25 - (quarter * square) * square)
    return y


def power_of_root(wide: Tensor) -> Tensor:
    """Return the power of two U of each code of a fourth root: the root of its number is in [U, 2.25 U)."""
    return _power_bits(wide).view(torch.float32)


def inverse_power_of_root(wide: Tensor) -> Tensor:
    """Return 1/U."""
    return ((254 << 23) - _power_bits(wide)).view(torch.float32)


def _power_bits(wide: Tensor) -> Tensor:
    # A pattern shifted by one bit is about that of the square.
    return ((wide << DROP + 1) + _SIGNED_UNIT_BASE) & EXPONENT


def _cut(bits: Tensor, words: Tensor | None) -> Tensor:
    """Return patterns without the bits below codes, rounded."""
    add = ((1 << DROP - 1) - 1) + ((bits >> DROP) & 1) if words is None else draw(words, DROP)
    return (bits + add) >> DROP
