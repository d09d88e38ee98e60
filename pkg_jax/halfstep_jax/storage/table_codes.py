"""Codes of the numbers of a table.

Contract: F8 to F11.
"""

import jax
import jax.numpy as jnp
import numpy as np

from halfstep_jax.storage.base_codes import (
    BIAS,
    NAN_SCALE,
    Codes,
    Mask,
    must_not_vanish,
    power_of_two,
    unit_of_scale,
)
from halfstep_jax.storage.tables import decode_table, encode_table


class TableCodes(Codes):
    """Numbers of a table: the number of a code stands for number 2^(byte - 127)."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        y = x * power_of_two(np.uint32(2 * BIAS) - scale.astype(jnp.uint32))
        codes = encode_table(y, words, self.numbers)
        if nonzero is not False and self.numbers.has_zero:
            codes = jnp.where(must_not_vanish(x, nonzero) & (codes == 0), np.uint8(1), codes)
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        return decode_table(codes, self.numbers) * unit_of_scale(scale, 0)
