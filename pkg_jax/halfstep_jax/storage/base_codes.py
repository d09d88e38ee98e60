"""The interface of codes that a `Format` uses.

Contract: F4, F5. Elementwise; which elements share a scale is not known here (`blocks.py`, `formats.py`).
"""

import jax

from halfstep.storage import base_codes as shared
from halfstep_jax.numbers.arrays import JaxArrays, as_int32

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
        """Return the scale bytes of blocks with the largest magnitudes `block_max`."""
        return self.shared.scale(JaxArrays(), block_max)

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Return the codes of float32 `x`; where `nonzero`, no other number is stored as zero."""
        return self.shared.encode(JaxArrays(), x, scale, as_int32(words), nonzero)

    def with_inverse_root(
        self, x: jax.Array, words: jax.Array | None, zero: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the codes of x, and about 1/sqrt(x); where the format has inverse roots."""
        return self.shared.with_inverse_root(JaxArrays(zero), x, as_int32(words))

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the float32 values of codes; `words`: with which dithered codes were made."""
        return self.shared.decode(JaxArrays(), as_int32(codes), scale, as_int32(words))
