"""Codes that are floats without a sign, for second moments.

Contract: F6.
"""

import jax
import jax.numpy as jnp
import numpy as np

from halfstep_jax.storage.base_codes import INFINITY, NAN_SCALE, Codes, Mask
from halfstep_jax.storage.unsigned_floats import NAN_CODE, decode_unsigned, encode_unsigned


class UnsignedCodes(Codes):
    """Unsigned floats whose base is their block's, or of a fixed base."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite; a number that is not zero is never stored as zero."""
        del nonzero
        codes = encode_unsigned(x, words, self.numbers, self._base(scale))
        if scale is None:
            return jnp.where(jnp.abs(x) < INFINITY, codes, NAN_CODE)
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        values = decode_unsigned(codes, self.numbers, self._base(scale))
        is_nan = codes == NAN_CODE if scale is None else scale == NAN_SCALE
        return jnp.where(is_nan, np.float32(np.nan), values)

    def _base(self, scale) -> jax.Array | np.uint32:
        """Return what code 0 stands on: of every block, or one for all."""
        if scale is None:
            return np.uint32(self.numbers.fixed_base)
        return self.numbers.base(scale.astype(jnp.uint32))
