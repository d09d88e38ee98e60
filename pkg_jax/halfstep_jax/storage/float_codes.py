"""Codes that are floats with a sign.

Contract: F5.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage.floats import numbers_of
from halfstep_jax.numbers.arrays import JaxArrays, as_int32
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.storage.base_codes import Codes, Mask
from halfstep_jax.xla.kept_on_cpu import keep_codes_for_kernels


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
        return jnp.uint16 if self.dtype == "float16" else jnp.uint8

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round, and mark infinities and NaN."""
        code = self.shared.rounded(JaxArrays(), x, scale, as_int32(words), nonzero)
        finite, bits = jnp.abs(x) < np.float32(np.inf), code.astype(self._bits)
        return lax.platform_dependent(
            finite, bits, cpu=self._select_once, tpu=self._select_floats, default=self._select_bits
        )

    def _select_once(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Do as `_select_bits`. XLA on CPU repeats operations that end in a bitcast where codes are read."""
        return keep_codes_for_kernels(self._select_bits(finite, bits))

    def _select_bits(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Return the codes of magnitudes and signs, NaN where the value was not finite."""
        return lax.bitcast_convert_type(jnp.where(finite, bits, self._nan), self.dtype)

    @property
    def _nan(self) -> np.ndarray:
        return np.array(self.numbers.nan_code, self._bits)

    def _select_floats(self, finite: jax.Array, bits: jax.Array) -> jax.Array:
        """Do as `_select_bits`. Where the last operation is a bitcast, XLA on TPU writes both sides of it."""
        nan = lax.bitcast_convert_type(self._nan, self.dtype)
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
        bits = as_int32(lax.bitcast_convert_type(codes, self._bits))
        return numbers_of(JaxArrays(), bits, self.numbers)


def cast(codes: jax.Array) -> jax.Array:
    """Return the numbers of 8-bit floats by one operation: XLA on TPU does not repeat many."""
    return codes.astype(jnp.float32)
