"""Integers under a scale of three significant bits, and codes under a scale that is the same for all blocks.

Contract: F13 to F15.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.numbers.float_formats import FloatFormat
from halfstep_jax.numbers.roots import divide
from halfstep_jax.numbers.rounding import round_to_code
from halfstep_jax.storage.base_codes import NAN_SCALE, Codes, Mask, WithoutScale, must_not_vanish
from halfstep_jax.storage.float_codes import INT8, IntegerCodes, SignedCodes
from halfstep_jax.storage.unsigned_floats import UNSIGNED_FLOATS, decode_unsigned

_SCALES = UNSIGNED_FLOATS["ufloat8_e6m2"]
# What the range of codes without a scale must hold: 7.27 at b1 = 0.9 and b2 = 0.999, and some.
_BOUND = np.float32(7.5)
# The codes of float8_e3m4, each of which stands for half as much: so the scale costs no product.
_HALVES = FloatFormat("float8_e3m4", 4, -3, 7.75)


@dataclasses.dataclass(frozen=True)
class FixedCodes(WithoutScale):
    """Floats of 8 bits under one scale, that of a block whose largest magnitude is 7.5: none is stored.

    Their codes are uint8, and the last operation on them a select, which XLA on CPU keeps; what ends in a
    bitcast to a float8 dtype it computes again wherever it is used.

    Attributes:
        numbers: the codes, with what they stand for under that scale.
    """

    numbers: SignedCodes = dataclasses.field(default_factory=lambda: SignedCodes(_HALVES))
    dtype: str = "uint8"
    signed: bool = True
    for_second_moments: bool = False

    @property
    def half_gap(self) -> float:
        """That of the codes."""
        return self.numbers.half_gap

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(24)) & np.uint32(0x80)
        code = round_to_code(x, self.numbers.numbers, words).astype(jnp.uint32) | sign
        return jnp.where(jnp.abs(x) < np.float32(np.inf), code.astype(jnp.uint8), self.numbers.nan)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return self.numbers.decode_bits(codes)


@dataclasses.dataclass(frozen=True)
class FixedIntegerCodes(FixedCodes):
    """int8 under one scale, 1/16; -128 is NaN."""

    numbers: SignedCodes = dataclasses.field(default_factory=IntegerCodes)
    dtype: str = "int8"

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        codes = self.numbers.encode(x, self._scale, words, False)
        return jnp.where(jnp.abs(x) < np.float32(np.inf), codes, np.int8(-128))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return jnp.where(codes == -128, np.float32(np.nan), self.numbers.decode(codes, self._scale))

    @property
    def _scale(self) -> jax.Array:
        return self.numbers.scale(jnp.asarray(_BOUND))


@dataclasses.dataclass(frozen=True)
class FineIntegerCodes:
    """Integers from -K to K under a fine scale s, an `ufloat8_e6m2`: q stands for q s.

    Attributes:
        largest: K.
    """

    largest: int = 127
    dtype: str = "int8"
    signed: bool = True
    packed: bool = False
    nan_in_scale: bool = True
    dithered: bool = False
    for_second_moments: bool = False
    scale_range: tuple[int, int] = (1, 254)

    @property
    def half_gap(self) -> float:
        """Half of the gap below the largest code."""
        return 0.5 / self.largest

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


@dataclasses.dataclass(frozen=True)
class DitheredCodes(FineIntegerCodes):
    """Integers from -7 to 7 in four bits, rounded with a dither d: q stands for (q - d) s.

    The code is q + 8; 0 is exact zero, the code of zero alone. `words` is one word for all elements, of which
    d is a number in (-1/2, 1/2), or None: d = 0.
    """

    largest: int = 7
    dtype: str = "uint8"
    packed: bool = True
    dithered: bool = True

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round x / s + d to nearest integers that stop at 7."""
        q = lax.round(self._ratio(x, scale) + _dither(words), lax.RoundingMethod.TO_NEAREST_EVEN)
        codes = (jnp.clip(q, -self.largest, self.largest).astype(jnp.int32) + 8).astype(jnp.uint8)
        # By its bits: XLA on CPU takes a subnormal number for zero.
        is_zero = (lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)) == 0
        return jnp.where(is_zero | (scale == NAN_SCALE), np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return (q - d) s, rounded once."""
        values = ((codes.astype(jnp.int32) - 8).astype(jnp.float32) - _dither(words)) * self._unit(scale)
        return jnp.where((codes == 0) & (scale != NAN_SCALE), np.float32(0), values)


def _dither(word: jax.Array | None):
    """Return an odd multiple of 2^-21 in (-1/2, 1/2), from the top 20 bits; q less such a d is exact."""
    if word is None:
        return np.float32(0)
    odd = ((word >> np.uint32(12)) << np.uint32(1)) | np.uint32(1)
    return odd.astype(jnp.float32) * np.float32(2.0**-21) - np.float32(0.5)


FIXED_CODES: dict[str, Codes] = {
    "float8_e3m4": FixedCodes(),
    "int8": FixedIntegerCodes(),
}
"""By name: codes that `relative` takes without a block size."""
FINE_CODES: dict[str, Codes] = {"int8": FineIntegerCodes(), "int4": DitheredCodes()}
"""By name: codes under a fine scale."""
