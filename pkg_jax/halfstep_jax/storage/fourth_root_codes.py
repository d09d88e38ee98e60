"""Second moments kept as their fourth roots, and first moments in units of a power of two beside them.

Contract: F17, F18. A fourth root that is rounded linearly keeps the mean of nu^(1/4), which a step needs
(F6). Its reciprocal comes out of three steps of Newton's: multiplications and a subtraction, no root, no
quotient.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage.fourth_roots import DROP, EXPONENT, FIRST_GUESS, UNIT_BASE
from halfstep_jax.numbers.rounding import draw
from halfstep_jax.storage.base_codes import INFINITY, Codes, Mask
from halfstep_jax.xla.exact import opaque_product, opaque_zero

_MAGNITUDE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
_DROP = np.uint32(DROP)
_MINUS_INFINITY = np.float32(-np.inf).view(np.int32)


class FourthRootCodes(Codes):
    """Floats of four exponent and four mantissa bits: the fourth roots of what is stored. 255 is NaN."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round the fourth root."""
        del scale, nonzero
        y = inverse_fourth_root(x, opaque_zero())
        bits = jnp.maximum(_bits((x * y) * (y * y)) & _MAGNITUDE, np.uint32(self.numbers.base << DROP))
        return self._rounded(x, bits, words)

    def with_inverse_root(
        self, x: jax.Array, words: jax.Array | None, zero: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the codes of x, and about 1/sqrt(x) of x as it is.

        Args:
            x: float32, above the smallest number by more than the error of its root.
            words: uint32, or None for nearest, ties to even.
            zero: for `exact.opaque_product`.
        """
        y = inverse_fourth_root(x, zero)
        s = y * y
        return self._rounded(x, _bits((x * y) * s), words), s

    def _rounded(self, x: jax.Array, bits: jax.Array, words: jax.Array | None) -> jax.Array:
        bits = jnp.minimum(bits, np.uint32((self.numbers.base + self.numbers.last) << DROP))
        codes = (_cut(bits, words) - np.uint32(self.numbers.base)).astype(jnp.uint8)
        return jnp.where(x < INFINITY, codes, np.uint8(255))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the fourth powers: exact, since five bits to the fourth are twenty."""
        root = _float((codes.astype(jnp.uint32) + np.uint32(self.numbers.base)) << _DROP)
        square = root * root
        return jnp.where(codes == 255, np.float32(np.nan), square * square)


class MuLawCodes(Codes):
    """A sign and 128 magnitudes: floats of three exponent and four mantissa bits, less 1/16."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round the magnitude; NaN has the largest one, and no sign."""
        del scale, nonzero
        base, last = self.numbers.base, self.numbers.base + self.numbers.last
        bits = _bits(jnp.abs(x) + np.float32(self.numbers.offset))
        code = _cut(jnp.minimum(bits, np.uint32(last << DROP)), words)
        # As integers negative numbers are up to minus infinity, and NaN are above it.
        negative = lax.bitcast_convert_type(x, jnp.int32) <= _MINUS_INFINITY
        return (code - jnp.where(negative, np.uint32(base - 128), np.uint32(base))).astype(jnp.uint8)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the numbers: exact."""
        codes = codes.astype(jnp.uint32)
        bits = ((codes & np.uint32(127)) + np.uint32(self.numbers.base)) << _DROP
        magnitude = _float(bits) - np.float32(self.numbers.offset)
        return _float(_bits(magnitude) | ((codes << np.uint32(24)) & _SIGN))


def inverse_fourth_root(v: jax.Array, zero: jax.Array) -> jax.Array:
    """Return y, about v^(-1/4): three times y <- y (5/4 - ((v/4) y^2) y^2), each operation rounded once.

    Args:
        v: float32, not negative. Of infinity y is infinite or NaN.
        zero: for `exact.opaque_product`.

    Example:
        >>> float(inverse_fourth_root(jnp.float32(16.0), opaque_zero()))
        0.5
    """
    quarter = v * np.float32(0.25)
    y = _float(np.uint32(FIRST_GUESS) - (_bits(v) >> np.uint32(2)))
    for _ in range(3):
        square = y * y
        y = y * (np.float32(1.25) - opaque_product(quarter * square, square, zero))
    return y


def power_of_root(codes: jax.Array) -> jax.Array:
    """Return the power of two U of each code of a fourth root: the root of its number is in [U, 2.25 U)."""
    return _float(_power_bits(codes))


def inverse_power_of_root(codes: jax.Array) -> jax.Array:
    """Return 1/U."""
    return _float(np.uint32(254 << 23) - _power_bits(codes))


def _power_bits(codes: jax.Array) -> jax.Array:
    # A pattern shifted by one bit is about that of the square.
    shifted = (codes.astype(jnp.uint32) << np.uint32(DROP + 1)) + np.uint32(UNIT_BASE)
    return shifted & np.uint32(EXPONENT)


def _cut(bits: jax.Array, words: jax.Array | None) -> jax.Array:
    """Return patterns without the bits below codes, rounded."""
    if words is None:
        add = np.uint32((1 << DROP - 1) - 1) + ((bits >> _DROP) & np.uint32(1))
    else:
        add = draw(words, DROP)
    return (bits + add) >> _DROP


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
