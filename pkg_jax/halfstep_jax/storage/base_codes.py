"""What a `Format` asks of its codes, of whatever kind, and what kinds have in common.

Contract: F4, F5. Elementwise; which elements share a scale is not known here (`blocks.py`, `formats.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage import codes as shared

NAN_SCALE = np.uint8(shared.NAN_SCALE)
"""The scale byte of a block that holds a NaN which its codes cannot."""
INFINITY = np.float32(np.inf)
MANTISSA_BITS = np.uint32(23)
BIAS = 127
_NAN = np.float32(np.nan).view(np.uint32)
Mask = bool | jax.Array
"""Of all elements, or of each."""


class Codes(shared.Codes):
    """Codes, and their arithmetic. `scale` is the scale byte of every element; None in a format without."""

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the scale bytes of blocks whose largest magnitudes are `block_max`.

        That is the exponent field of the power of two to which the largest magnitude fits.
        """
        bits = lax.bitcast_convert_type(block_max, jnp.uint32)
        field = (bits + np.uint32(self.carry) if self.carry else bits) >> MANTISSA_BITS
        field = field + np.uint32(self.step) if self.step else field
        byte = jnp.clip(field, *self.scale_range).astype(jnp.uint8)
        return jnp.where(block_max < INFINITY, byte, NAN_SCALE) if self.nan_in_scale else byte

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Return the codes of float32 `x`; where `nonzero`, what is not zero is not stored as zero."""
        raise NotImplementedError

    def with_inverse_root(
        self, x: jax.Array, words: jax.Array | None, zero: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the codes of x, and about 1/sqrt(x); where the format has inverse roots."""
        raise NotImplementedError

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the float32 values of codes; `words`: with which dithered codes were made."""
        raise NotImplementedError


def must_not_vanish(x: jax.Array, nonzero: Mask) -> jax.Array:
    """Tell what must not be stored as zero."""
    # By the bits of x: XLA on CPU takes a subnormal number for zero.
    return (lax.bitcast_convert_type(x, jnp.int32) > 0) & nonzero


def power_of_two(field: jax.Array) -> jax.Array:
    """Return the power of two with the exponent field `field`, uint32."""
    return lax.bitcast_convert_type(field << MANTISSA_BITS, jnp.float32)


def unit_of_scale(scale: jax.Array, down: int) -> jax.Array:
    """Return the power of two of exponent field `scale` - `down`; NaN in a marked block."""
    field = scale.astype(jnp.uint32) - np.uint32(down)
    return lax.platform_dependent(scale, field, tpu=_marked_by_bits, default=_marked_by_select)


def _marked_by_select(scale: jax.Array, field: jax.Array) -> jax.Array:
    return jnp.where(scale == NAN_SCALE, np.float32(np.nan), power_of_two(field))


def _marked_by_bits(scale: jax.Array, field: jax.Array) -> jax.Array:
    """Do as `_marked_by_select`, without a select, which XLA on TPU keeps in memory for every element."""
    nan = (scale == NAN_SCALE).astype(jnp.uint32) * _NAN
    return lax.bitcast_convert_type((field << MANTISSA_BITS) | nan, jnp.float32)
