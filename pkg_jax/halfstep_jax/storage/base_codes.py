"""What a `Format` asks of its codes, of whatever kind.

Contract: F4, F5. Elementwise; which elements share a scale is not known here (`blocks.py`, `formats.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage import base_codes as shared
from halfstep_jax.numbers.arrays import JaxArrays, as_int32, marked_unit

NAN_SCALE = np.uint8(shared.NAN_SCALE)
"""The scale byte of a block that holds a NaN which its codes cannot."""
INFINITY = np.float32(np.inf)
MANTISSA_BITS = np.uint32(23)
BIAS = 127
Mask = bool | jax.Array
"""Of all elements, or of each."""


class Codes:
    """Codes of arrays of JAX: their arithmetic is that of `halfstep`, unless a subclass says otherwise.

    `scale` is the scale byte of every element; None in a format without.
    """

    def __init__(self, codes: shared.Codes):
        self.shared = codes
        self.dtype, self.numbers, self.exponent = codes.dtype, codes.numbers, codes.exponent

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the scale bytes of blocks whose largest magnitudes are `block_max`."""
        return self.shared.scale(JaxArrays(), block_max)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Return the codes of float32 `x`; where `nonzero`, what is not zero is not stored as zero."""
        return self.shared.encode(JaxArrays(), x, as_int32(scale), as_int32(words), nonzero)

    def with_inverse_root(
        self, x: jax.Array, words: jax.Array | None, zero: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the codes of x, and about 1/sqrt(x); where the format has inverse roots."""
        return self.shared.with_inverse_root(JaxArrays(zero), x, as_int32(words))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the float32 values of codes; `words`: with which dithered codes were made."""
        return self.shared.decode(JaxArrays(), as_int32(codes), as_int32(scale), as_int32(words))


def must_not_vanish(x: jax.Array, nonzero: Mask) -> jax.Array:
    """Tell what must not be stored as zero."""
    # By the bits of x: XLA on CPU takes a subnormal number for zero.
    return (lax.bitcast_convert_type(x, jnp.int32) > 0) & nonzero


def power_of_two(field: jax.Array) -> jax.Array:
    """Return the power of two with the exponent field `field`, uint32."""
    return lax.bitcast_convert_type(field << MANTISSA_BITS, jnp.float32)


def unit_of_scale(scale: jax.Array, down: int) -> jax.Array:
    """Return the power of two of exponent field `scale` - `down`; NaN in a marked block."""
    # Marks are looked for in bytes: XLA would keep scales in int32 for that.
    return marked_unit(scale, scale.astype(jnp.int32) - np.int32(down))
