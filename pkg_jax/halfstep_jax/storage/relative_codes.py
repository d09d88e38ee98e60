"""Integers under a scale of three significant bits, and codes under a scale that is the same for all blocks.

Contract: F13 to F15.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.float_formats import INT8
from halfstep.storage.codes import DEAD_ZONE, SCALED_CODES
from halfstep.storage.relative import LARGEST_BOUND
from halfstep.storage.unsigned_floats import UNSIGNED_FLOATS
from halfstep_jax.numbers.roots import divide
from halfstep_jax.numbers.rounding import round_to_code
from halfstep_jax.storage.base_codes import NAN_SCALE, Codes, Mask, must_not_vanish
from halfstep_jax.storage.float_codes import IntegerCodes, decode_bits, nan_bits
from halfstep_jax.storage.unsigned_floats import decode_unsigned

_SCALES = UNSIGNED_FLOATS["ufloat8_e6m2"]
_INTEGERS = IntegerCodes.of(SCALED_CODES["int8"])


class FixedCodes(Codes):
    """Floats of 8 bits under the scale of a block whose largest magnitude is 7.5: no scale is stored.

    Their codes are uint8. The last operation on them is a select, which XLA on CPU keeps. XLA computes a
    value that ends in a bitcast to a float8 dtype anew wherever the value is used.
    """

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(24)) & np.uint32(0x80)
        code = round_to_code(x, self.numbers, words).astype(jnp.uint32) | sign
        return jnp.where(jnp.abs(x) < np.float32(np.inf), code.astype(jnp.uint8), nan_bits(self.numbers.name))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return decode_bits(codes, self.numbers)


class FixedIntegerCodes(Codes):
    """int8 under one scale, 1/16; -128 is NaN."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        codes = _INTEGERS.encode(x, _sixteenths(), words, False)
        return jnp.where(jnp.abs(x) < np.float32(np.inf), codes, np.int8(-128))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return jnp.where(codes == -128, np.float32(np.nan), _INTEGERS.decode(codes, _sixteenths()))


class FineIntegerCodes(Codes):
    """Integers from -K to K under a fine scale s, an `ufloat8_e6m2`: q stands for q s."""

    @property
    def largest(self) -> int:
        """K."""
        return int(self.numbers.max)

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the scales, rounded up: `block_max` over K fits. Past the largest, the block is marked."""
        least = lax.bitcast_convert_type(block_max * np.float32(1 / self.largest), jnp.uint32)
        drop = 23 - _SCALES.mantissa_bits
        code = ((least + np.uint32((1 << drop) - 1)) >> np.uint32(drop)).astype(jnp.int32)
        code = jnp.clip(code - np.int32(_SCALES.fixed_base), 1, 255).astype(jnp.uint8)
        return jnp.where(block_max < np.float32(np.inf), code, NAN_SCALE)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round x / s to integers that stop at K."""
        code = jnp.minimum(round_to_code(self._ratio(x, scale), INT8, words), self.largest)
        if nonzero is not False:
            code = jnp.where(must_not_vanish(x, nonzero), jnp.maximum(code, 1), code)
        negative = lax.bitcast_convert_type(x, jnp.int32) < 0
        return jnp.where(scale == NAN_SCALE, np.int8(0), jnp.where(negative, -code, code).astype(jnp.int8))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the integers times s: exact."""
        return codes.astype(jnp.float32) * self._unit(scale)

    def _ratio(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Return x / s, a quotient: of what was stored, the integer that it was."""
        return divide(x, decode_unsigned(scale, _SCALES, _SCALES.fixed_base))

    def _unit(self, scale: jax.Array) -> jax.Array:
        unit = decode_unsigned(scale, _SCALES, _SCALES.fixed_base)
        return jnp.where(scale == NAN_SCALE, np.float32(np.nan), unit)


class DitheredCodes(FineIntegerCodes):
    """Integers from -7 to 7 in four bits, rounded with a dither d: q stands for (q - d) s.

    The code is q + 8; 0 is exact zero, and what is stored of |y| up to 1/16. d is a number in (-1/2, 1/2) of
    the words, which are alike throughout a block; None: d = 0.
    """

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round x / s + d to nearest integers that stop at 7; near zero to zero itself."""
        unit = decode_unsigned(scale, _SCALES, _SCALES.fixed_base)
        q = lax.round(divide(x, unit) + _dither(words), lax.RoundingMethod.TO_NEAREST_EVEN)
        codes = (jnp.clip(q, -self.largest, self.largest).astype(jnp.int32) + 8).astype(jnp.uint8)
        # That is |x / s| <= 1/16: s has three bits, so that no x is so near above s/16 that x / s is 1/16. A
        # quotient with two uses XLA on CPU keeps in float32.
        is_zero = jnp.abs(x) <= unit * np.float32(DEAD_ZONE)
        return jnp.where(is_zero | (scale == NAN_SCALE), np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return (q - d) s, rounded once."""
        values = ((codes.astype(jnp.int32) - 8).astype(jnp.float32) - _dither(words)) * self._unit(scale)
        return jnp.where((codes == 0) & (scale != NAN_SCALE), np.float32(0), values)


def _sixteenths() -> jax.Array:
    """Return the scale byte under which 1 stands for 1/16: that of a block whose maximum is the bound."""
    return _INTEGERS.scale(jnp.asarray(np.float32(LARGEST_BOUND)))


def _dither(words: jax.Array | None):
    """Return odd multiples of 2^-17 in (-1/2, 1/2), from the top 16 bits; q less such a d is exact."""
    if words is None:
        return np.float32(0)
    odd = ((words >> np.uint32(16)) << np.uint32(1)) | np.uint32(1)
    return odd.astype(jnp.float32) * np.float32(2.0**-17) - np.float32(0.5)
