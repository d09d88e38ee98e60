"""Unsigned 8-bit floats for second moments: no sign, no subnormal numbers, zero for zero alone.

Contract: F6. Code 0 is zero; code c > 0 is float32's own pattern, cut to M mantissa bits and counted from a
base: (c + base) << (23 - M). So encoding is an addition, a shift and a clamp.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage import unsigned_floats
from halfstep.storage.unsigned_floats import UnsignedFloat
from halfstep_jax.numbers.rounding import draw

_MAGNITUDE = np.uint32(0x7FFFFFFF)


NAN_CODE = np.uint8(unsigned_floats.NAN_CODE)


def encode_unsigned(x: jax.Array, words: jax.Array | None, fmt: UnsignedFloat, base) -> jax.Array:
    """Round non-negative float32 `x` to uint8 codes: add the word or one half, cut the pattern, clamp.

    Args:
        x: float32, not negative; what is not finite is the caller's business.
        words: uint32, or None for nearest, ties to even.
        fmt: the format.
        base: uint32, of every element, or one for all.

    Example:
        >>> from halfstep.storage.unsigned_floats import UNSIGNED_FLOATS
        >>> fmt = UNSIGNED_FLOATS["ufloat8_e6m2"]
        >>> encode_unsigned(jnp.array([0.0, 1e-30, 1.0, 1e9]), None, fmt, fmt.fixed_base).tolist()
        [0, 1, 200, 255]
    """
    drop = 23 - fmt.mantissa_bits
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    if words is None:
        add = np.uint32(2 ** (drop - 1) - 1) + ((bits >> np.uint32(drop)) & np.uint32(1))
    else:
        add = draw(words, drop) + _root_term(bits, fmt)
    above = ((bits + add) >> np.uint32(drop)).astype(jnp.int32) - jnp.asarray(base).astype(jnp.int32)
    # Zero alone is less than one; by its bits, since XLA on CPU takes a subnormal number for zero.
    least = jnp.minimum(bits & _MAGNITUDE, np.uint32(1)).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(above, least), 255).astype(jnp.uint8)


def _root_term(bits: jax.Array, fmt: UnsignedFloat) -> jax.Array:
    """Return what rounding adds so that it keeps the mean of x^(1/4), and not of x.

    A step divides by the root of a second moment, so E[x^(-1/2)] must be right. Let f be the fraction that is
    cut off, and k 3/8 of the gap, divided by the number that is kept. The chance of the next number is
    f + k f (1 - f). Eleven bits of f are enough, and a straight line instead of 1 / mantissa (contract F6).
    """
    m, drop = fmt.mantissa_bits, 23 - fmt.mantissa_bits
    kept = (bits >> np.uint32(drop)) & np.uint32(2**m - 1)
    cut = (bits >> np.uint32(drop - 11)) & np.uint32(2047)
    # Factors of two are taken out of 368 - (192 >> M) m.
    k = np.uint32(23 << (m - 2)) - np.uint32(3) * kept
    return (cut * (cut ^ np.uint32(2047)) * k) >> np.uint32(3 + 3 * m)


def decode_unsigned(codes: jax.Array, fmt: UnsignedFloat, base) -> jax.Array:
    """Return the float32 value of every code: exact.

    Example:
        >>> from halfstep.storage.unsigned_floats import UNSIGNED_FLOATS
        >>> fmt = UNSIGNED_FLOATS["ufloat8_e6m2"]
        >>> decode_unsigned(jnp.array([0, 200, 201], jnp.uint8), fmt, fmt.fixed_base).tolist()
        [0.0, 1.0, 1.25]
    """
    bits = (codes.astype(jnp.uint32) + base) << np.uint32(23 - fmt.mantissa_bits)
    return lax.bitcast_convert_type(jnp.where(codes == 0, np.uint32(0), bits), jnp.float32)
