"""Codes that are floats with a sign.

Contract: F5.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from halfstep.float_formats import FloatFormat
from halfstep_jax.numbers.arrays import JaxArrays
from halfstep_jax.numbers.rounding import round_and_cast, round_to_code
from halfstep_jax.storage.base_codes import Codes, Mask
from halfstep_jax.xla.kept_on_cpu import keep_codes_for_kernels

_SIGN = np.uint32(0x80000000)


class PlainCodes(Codes):
    """float32, bfloat16 or float16."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round to the dtype."""
        return round_and_cast(x, self.dtype, words, saturate=True)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Cast."""
        return codes.astype(jnp.float32)


class SignedCodes(Codes):
    """Floats with a sign: the code of y stands for y 2^(byte - 127 - e), e the exponent of the largest code.

    Codes are made and read as integers, but read by a cast on a TPU. XLA on CPU has casts to and from 8-bit
    floats, and selects between them, but ten times slower; only the bitcast at the end and the one at the
    beginning know the dtype.
    """

    @property
    def _bits(self) -> type:
        return jnp.uint16 if np.dtype(_numpy_dtype(self.dtype)).itemsize == 2 else jnp.uint8

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark what is not finite."""
        width = 8 * np.dtype(self._bits).itemsize
        code = self.magnitude(x, scale, words, nonzero).astype(jnp.uint32)
        sign = lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31) << np.uint32(width - 1)
        finite, bits = jnp.abs(x) < np.float32(np.inf), (code | sign).astype(self._bits)
        return lax.platform_dependent(
            finite, bits, cpu=self._select_once, tpu=self._select_floats, default=self._select_bits
        )

    def _select_once(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Do as `_select_bits`. What ends in a bitcast, XLA on CPU makes again where codes are read."""
        nan = nan_bits(self.dtype)
        return keep_codes_for_kernels(lax.bitcast_convert_type(jnp.where(finite, bits, nan), self.dtype))

    def _select_bits(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Return the codes of magnitudes and signs, NaN where the value was not finite."""
        return lax.bitcast_convert_type(jnp.where(finite, bits, nan_bits(self.dtype)), self.dtype)

    def _select_floats(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Do as `_select_bits`. Where the last operation is a bitcast, XLA on TPU writes both sides of it."""
        nan = np.array(np.nan, _numpy_dtype(self.dtype))
        return jnp.where(finite, lax.bitcast_convert_type(bits, self.dtype), nan)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the values: exact."""
        if self._bits == jnp.uint8:
            numbers = lax.platform_dependent(codes, tpu=cast, default=self._decoded)
        else:
            numbers = self._decoded(codes)
        return numbers * JaxArrays().unit(scale, self.exponent)

    def _decoded(self, codes: jax.Array) -> jax.Array:
        """Return the numbers of codes, read as integers."""
        return decode_bits(lax.bitcast_convert_type(codes, self._bits), self.numbers)

    def magnitude(self, x, scale, words, nonzero) -> jax.Array:
        """Return the codes of |x|, finite, in int32; `scale` of every element, or one for all."""
        xp = JaxArrays()
        # Of a magnitude: XLA on CPU computes x again, where it would keep an x that meets its own scale.
        y = jnp.abs(x) * xp.floats((254 + self.exponent - xp.wide(scale)) << 23)
        code = round_to_code(y, self.numbers, words)
        if nonzero is not False:
            # By the bits of x: XLA on CPU takes a subnormal number for zero.
            code = jnp.where((xp.bits(x) > 0) & nonzero, jnp.maximum(code, 1), code)
        return code


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


def decode_bits(bits: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the numbers of codes, given as unsigned integers: the values under a scale of one."""
    width = 8 * bits.dtype.itemsize
    bits = bits.astype(jnp.uint32)
    value = _value(bits & np.uint32(2 ** (width - 1) - 1), fmt)
    sign = (bits << np.uint32(32 - width)) & _SIGN
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32)


def _value(magnitude: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the float32 values of the codes of magnitudes; NaN for what is past the largest."""
    first_normal = np.float32(2.0**fmt.min_exponent)
    bits = (magnitude << np.uint32(23 - fmt.mantissa_bits)) + first_normal.view(np.uint32)
    # Of a normal number these are the bits of its double, and of a subnormal one those of its sum with
    # the smallest normal number; that difference is exact. The lesser of what either rule gives is right.
    subnormal = lax.bitcast_convert_type(bits, jnp.float32) - first_normal
    normal = (bits - (np.uint32(1 << 23))).astype(jnp.int32)
    lesser = jnp.minimum(lax.bitcast_convert_type(subnormal, jnp.int32), normal)
    value = lax.bitcast_convert_type(lesser, jnp.float32)
    return jnp.where(magnitude > fmt.max_code, np.float32(np.nan), value)


def nan_bits(dtype: str) -> np.ndarray:
    """Return the code of NaN, as an unsigned integer."""
    nan = np.array(np.nan, _numpy_dtype(dtype))
    return nan.view(np.uint16 if nan.itemsize == 2 else np.uint8)


def _numpy_dtype(name: str):
    return getattr(ml_dtypes, name) if name.startswith("float8") else name


def cast(codes: jax.Array) -> jax.Array:
    """Return the numbers of 8-bit floats by one operation: what takes many XLA on TPU does not do twice."""
    return codes.astype(jnp.float32)
