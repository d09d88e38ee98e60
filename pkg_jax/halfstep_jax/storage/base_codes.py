"""What a `Format` asks of its codes, of whatever kind.

Contract: F4, F5. Elementwise; which elements share a scale is not known here (`blocks.py`, `formats.py`).
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NAN_SCALE = np.uint8(255)
"""The scale byte of a block that holds a NaN which its codes cannot."""
INFINITY = np.float32(np.inf)
MANTISSA_BITS = np.uint32(23)
BIAS = 127
_NAN = np.float32(np.nan).view(np.uint32)
Mask = bool | jax.Array
"""Of all elements, or of each."""


class Codes(Protocol):
    """What a `Format` asks of its codes.

    `scale` is the scale byte of every element, uint8; None in a format without.
    """

    @property
    def dtype(self) -> str:
        """The dtype of the arrays."""
        ...

    @property
    def signed(self) -> bool:
        """Whether negative values can be stored."""
        ...

    @property
    def half_gap(self) -> float:
        """Half the largest relative gap between codes, above the subnormal range."""
        ...

    @property
    def packed(self) -> bool:
        """Whether codes are of 4 bits, two of them kept in a byte; they are packed by who calls."""
        ...

    @property
    def nan_in_scale(self) -> bool:
        """Whether a NaN marks its block, since there is no code for it."""
        ...

    @property
    def for_second_moments(self) -> bool:
        """Whether small positive numbers are held well enough beside large ones."""
        ...

    @property
    def dithered(self) -> bool:
        """Whether one word serves all elements, and is asked for again by `decode`."""
        ...

    @property
    def scale_range(self) -> tuple[int, int]:
        """The lowest and the highest scale byte: no decoded value is subnormal in float32."""
        ...

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Return the scale bytes of blocks whose largest magnitudes are `block_max`."""
        ...

    def encode(self, x: jax.Array, scale, words: jax.Array | None, nonzero: Mask) -> jax.Array:
        """Return the codes of float32 `x`; where `nonzero`, what is not zero is not stored as zero."""
        ...

    def decode(self, codes: jax.Array, scale, words: jax.Array | None = None) -> jax.Array:
        """Return the float32 values of codes; `words`: with which dithered ones were made."""
        ...


class WithoutScale:
    """Codes that stand for their values by themselves."""

    packed = False
    dithered = False
    nan_in_scale = False
    scale_range = (0, 0)

    def scale(self, block_max: jax.Array) -> jax.Array:
        """Refuse: a format without scales asks for none."""
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
