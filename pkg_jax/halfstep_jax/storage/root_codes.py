"""Codes on a straight line in the eighth root, for second moments.

Contract: F16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage.unsigned_roots import FIELDS, GUESS, LEAST, PLACE_BITS, STEPS
from halfstep_jax.storage.base_codes import BIAS, NAN_SCALE, Codes, Mask, power_of_two, unit_of_scale
from halfstep_jax.xla.exact import rounded_product

_ONE = 1 << PLACE_BITS


class RootCodes(Codes):
    """Eighth powers of evenly spaced numbers, times the power of two of their block."""

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Round the root; there is no zero. What is not finite marks its block."""
        del nonzero
        y = x * power_of_two(np.uint32(2 * BIAS) - scale.astype(jnp.uint32))
        root = eighth_root(jnp.maximum(y, np.float32(LEAST)))
        place = (root * np.float32(self.numbers.top * _ONE)).astype(jnp.int32) - self.numbers.above * _ONE
        if words is None:
            drawn = _ONE // 2
        else:
            drawn = jnp.clip((words >> np.uint32(16)).astype(jnp.int32), *FIELDS) * 2 + 1
        codes = jnp.clip((place + drawn) >> PLACE_BITS, 0, 255).astype(jnp.uint8)
        return jnp.where(scale == NAN_SCALE, np.uint8(0), codes)

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the numbers: three squares and a product."""
        # The product is exact, so that it may be fused with the sum.
        x = codes.astype(jnp.float32) * np.float32(1 / 256) + np.float32(self.numbers.above / 256)
        for _ in range(3):
            x = x * x
        return x * (self.numbers.unit * unit_of_scale(scale, 0))


def eighth_root(y: jax.Array) -> jax.Array:
    """Return y^(1/8) to within 2.1 x 2^-24 of it: by products, sums and a shift, so the same everywhere.

    Two of Newton's steps to y^(-1/8), the first with a constant that halves what it leaves; then the root
    from that, and what it is short of by its own eighth power.

    Args:
        y: float32, from 2^-46 to 4.

    Example:
        >>> float(eighth_root(jnp.float32(2.0**-32)))
        0.0625

    Source: ours (contract F16).
    """
    bits = lax.bitcast_convert_type(y, jnp.uint32)
    # The sign, which is 0, but no compiler knows that.
    zero = bits >> np.uint32(31)
    x = lax.bitcast_convert_type(np.uint32(GUESS) - (bits >> np.uint32(3)), jnp.float32)
    eighth = y * np.float32(0.125)
    for c in STEPS:
        fourth = (x * x) * (x * x)
        x = x * (np.float32(c) - rounded_product((eighth * fourth) * fourth, zero))
    square = x * x
    root = y * ((square * square) * (square * x))
    left = np.float32(1) - rounded_product(root * x, zero)
    return rounded_product(root, zero) + rounded_product(root * (np.float32(0.875) * left), zero)
