"""The operations of `halfstep.arrays` on JAX arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage.base_codes import NAN_SCALE
from halfstep_jax.numbers.roots import divide_by_scale
from halfstep_jax.numbers.tables import decode_table, encode_table
from halfstep_jax.xla.exact import opaque_zero, rounded_product

_NAN, _MINUS_INFINITY = (np.float32(x).view(np.int32) for x in (np.nan, -np.inf))


class JaxArrays:
    """Operations of JAX; `zero` is from `exact.opaque_zero`, or made where a product needs it."""

    quotient = staticmethod(divide_by_scale)
    table_codes, table_numbers = staticmethod(encode_table), staticmethod(decode_table)

    def __init__(self, zero: jax.Array | None = None):
        self._zero = zero

    def bits(self, x):
        """Return the patterns of float32, or of uint32."""
        return lax.bitcast_convert_type(x, jnp.int32)

    def floats(self, bits):
        """Return the numbers of patterns."""
        return lax.bitcast_convert_type(bits, jnp.float32)

    def real(self, x):
        """Return float32."""
        return x.astype(jnp.float32)

    def integer(self, x):
        """Return int32, toward zero."""
        return x.astype(jnp.int32)

    def wide(self, scale):
        """Return bytes as int32."""
        return scale.astype(jnp.int32)

    def stored(self, codes, dtype):
        """Return codes in their dtype: marking them is the last operation."""
        return codes.astype(dtype)

    def shift(self, bits, by):
        """Return patterns moved down, int32 or uint32."""
        return lax.shift_right_logical(bits, bits.dtype.type(by))

    def sign(self, x, bit):
        """Return a bit where there is a sign."""
        # As integers negative numbers are up to minus infinity, and NaN are above it.
        return jnp.where(self.bits(x) <= _MINUS_INFINITY, np.int32(bit), np.int32(0))

    def nearest(self, x):
        """Return the nearest whole numbers."""
        return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)

    def where(self, mask, x, y):
        """Return x where a mask holds, else y."""
        dtype = (x if hasattr(x, "dtype") else y).dtype
        return jnp.where(mask, *(z if hasattr(z, "dtype") else np.array(z, dtype) for z in (x, y)))

    def clip(self, x, low=None, high=None):
        """Return x between two bounds."""
        x = x if low is None else jnp.maximum(x, low)
        return x if high is None else jnp.minimum(x, high)

    def square(self, x):
        """Return x x."""
        return x * x

    def product(self, x, y):
        """Return a product that XLA fuses with no sum."""
        self._zero = opaque_zero() if self._zero is None else self._zero
        return rounded_product(x * y, self._zero)

    def unit(self, scale, down=0):
        """Return the power of two of exponent field `scale` - `down`; NaN of a marked block."""
        field = self.wide(scale)
        return lax.platform_dependent(
            scale, field - down if down else field, tpu=_marked_by_bits, default=_marked_by_select
        )

    def behind(self, x) -> "JaxArrays":
        """Return the same operations, with the sign of x as the opaque zero."""
        return JaxArrays(lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31))


def as_int32(x):
    """Return codes and words in int32."""
    if x is None:
        return None
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.uint32 else x.astype(jnp.int32)


def _marked_by_select(scale: jax.Array, field: jax.Array) -> jax.Array:
    unit = lax.bitcast_convert_type(field << np.int32(23), jnp.float32)
    return jnp.where(scale == NAN_SCALE, np.float32(np.nan), unit)


def _marked_by_bits(scale: jax.Array, field: jax.Array) -> jax.Array:
    """Do as `_marked_by_select` without a select, because XLA on TPU stores its mask for every element."""
    nan = (scale == NAN_SCALE).astype(jnp.int32) * _NAN
    return lax.bitcast_convert_type((field << np.int32(23)) | nan, jnp.float32)
