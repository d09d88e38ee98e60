"""Codes of the numbers of a table.

Contract: F8 to F11.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.storage.base_codes import (
    BIAS,
    INFINITY,
    MANTISSA_BITS,
    NAN_SCALE,
    Mask,
    must_not_vanish,
    power_of_two,
    unit_of_scale,
)
from halfstep_jax.storage.tables import Table, decode_table, encode_table


@dataclasses.dataclass(frozen=True)
class TableCodes:
    """Numbers of a table: that of a code stands for number 2^(byte - 127)."""

    table: Table
    dtype: str = "uint8"
    nan_in_scale: bool = True
    dithered: bool = False

    @property
    def for_second_moments(self) -> bool:
        """A sign that is always the same costs half of the numbers, and the small ones."""
        return not self.table.signed

    @property
    def signed(self) -> bool:
        """Whether the table is."""
        return self.table.signed

    @property
    def packed(self) -> bool:
        """Whether codes are of 4 bits."""
        return self.table.bits == 4

    @property
    def half_gap(self) -> float:
        """That of the table."""
        return self.table.largest_gap / 2

    @property
    def scale_range(self) -> tuple[int, int]:
        """So that half of the smallest number is normal, and the inverse of the largest scale."""
        # An average that decays from the smallest number passes half of it.
        return 3 - math.frexp(self.table.smallest)[1], 253

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the exponent field of the power of two to which the largest magnitude fits."""
        # A maximum fits on either side of zero: a signed table ends short of -1.
        fraction, exponent = math.frexp(self.table.shorter_end)
        past = np.uint32(0x7FFFFF) - (np.float32(fraction).view(np.uint32) & np.uint32(0x7FFFFF))
        byte = (lax.bitcast_convert_type(block_max, jnp.uint32) + past) >> MANTISSA_BITS
        byte = byte + np.uint32(1 - exponent)
        return jnp.where(block_max < INFINITY, jnp.clip(byte, *self.scale_range).astype(jnp.uint8), NAN_SCALE)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        y = x * power_of_two(np.uint32(2 * BIAS) - scale.astype(jnp.uint32))
        codes = encode_table(y, words, self.table)
        if nonzero is not False and self.table.has_zero:
            codes = jnp.where(must_not_vanish(x, nonzero) & (codes == 0), np.uint8(1), codes)
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return decode_table(codes, self.table) * unit_of_scale(scale, 0)
