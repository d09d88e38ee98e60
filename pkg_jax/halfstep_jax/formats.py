"""How a state array is stored: encode float32 to codes, decode codes to float32.

Contract: section F. A `Format` is all that a transform knows of storage, and it knows nothing of transforms.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from halfstep_jax.float_formats import FLOAT_FORMATS
from halfstep_jax.rounding import round_and_cast

PLAIN_STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Format:
    """A plain state dtype, elementwise and with no scale: codes are arrays of `dtype`."""

    dtype: str

    def zeros_like(self, p) -> jax.Array:
        """Return the codes of zeros, in the shape and with the sharding of `p`."""
        return jnp.zeros_like(p, dtype=self.dtype)

    def encode(self, x: jax.Array, words: jax.Array | None) -> jax.Array:
        """Round the float32 `x` to codes: finite values saturate, infinity becomes NaN (contract R6).

        Args:
            x: float32.
            words: uint32 words for stochastic rounding, or None for nearest.
        """
        return round_and_cast(x, self.dtype, words, saturate=True)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of `codes`: exact."""
        return codes.astype(jnp.float32)

    @property
    def rounds(self) -> bool:
        """Whether encoding rounds at all: in float32 no word is used."""
        return self.dtype != "float32"

    @property
    def gap_exponent(self) -> int:
        """The k of 2^-k, half the largest relative gap between codes: the explicit mantissa bits and one."""
        return FLOAT_FORMATS[self.dtype].mantissa_bits + 1

    def freezes(self, b) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short of its mean: 1 - b < 2^-gap_exponent.

        In float32; that format itself is taken as never freezing (contract F3).

        Example:
            >>> Format("bfloat16").freezes(0.999), Format("bfloat16").freezes(0.9)
            (True, False)
        """
        return self.rounds and bool(np.float32(1) - np.float32(b) < np.float32(2.0**-self.gap_exponent))


def as_format(function: str, argument: str, dtype) -> Format:
    """Return the `Format` of a plain state dtype.

    Args:
        function: whose argument it is, and
        argument: which one, for the error.
        dtype: a name, a dtype or a `Format`.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it cannot hold a state.
    """
    if isinstance(dtype, Format):
        return dtype
    way_out = 'Use "bfloat16", "float16" or "float32".'
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        raise TypeError(f"{function}: {argument}={dtype!r} is not a state dtype. {way_out}") from None
    if name.startswith("float8"):
        raise ValueError(
            f"{function}: {argument}={name} cannot hold a moment without a block scale. {way_out}"
        )
    if name not in PLAIN_STATE_DTYPES:
        raise ValueError(f"{function}: {argument}={name} is not a state dtype. {way_out}")
    return Format(name)


def default_format(p) -> Format:
    """Return the format of a moment of the weight `p` where none is asked for (contract F1)."""
    return Format("bfloat16" if p.dtype == jnp.bfloat16 else "float32")
