"""Codes that are floats without a sign, for second moments.

Contract: F6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.storage.base_codes import INFINITY, MANTISSA_BITS, NAN_SCALE, Mask, WithoutScale
from halfstep_jax.storage.unsigned_floats import NAN_CODE, UnsignedFloat, decode_unsigned, encode_unsigned


@dataclasses.dataclass(frozen=True)
class PlainUnsignedCodes(WithoutScale):
    """Unsigned floats of a fixed base."""

    numbers: UnsignedFloat
    dtype: str = "uint8"
    signed: bool = False
    for_second_moments: bool = True

    @property
    def half_gap(self) -> float:
        """2^-(p + 1) for p bits of mantissa."""
        return 2.0 ** -(self.numbers.mantissa_bits + 1)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        codes = encode_unsigned(x, words, self.numbers, self.numbers.fixed_base)
        return jnp.where(jnp.abs(x) < INFINITY, codes, NAN_CODE)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        values = decode_unsigned(codes, self.numbers, self.numbers.fixed_base)
        return jnp.where(codes == NAN_CODE, np.float32(np.nan), values)


@dataclasses.dataclass(frozen=True)
class UnsignedCodes:
    """Unsigned floats whose base is their block's."""

    numbers: UnsignedFloat
    dtype: str = "uint8"
    signed: bool = False
    packed: bool = False
    nan_in_scale: bool = True
    dithered: bool = False
    for_second_moments: bool = True

    @property
    def half_gap(self) -> float:
        """2^-(p + 1) for p bits of mantissa."""
        return 2.0 ** -(self.numbers.mantissa_bits + 1)

    @property
    def scale_range(self) -> tuple[int, int]:
        """From the byte whose block has a normal number for its smallest."""
        return 2**self.numbers.exponent_bits - 1, 253

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the exponent field of the power of two to which the largest magnitude fits."""
        byte = lax.bitcast_convert_type(block_max, jnp.uint32) >> MANTISSA_BITS
        return jnp.where(block_max < INFINITY, jnp.clip(byte, *self.scale_range).astype(jnp.uint8), NAN_SCALE)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round; they never store as zero what is not."""
        del nonzero
        codes = encode_unsigned(x, words, self.numbers, self.numbers.base(scale))
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        values = decode_unsigned(codes, self.numbers, self.numbers.base(scale))
        return jnp.where(scale == NAN_SCALE, np.float32(np.nan), values)
