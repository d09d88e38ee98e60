"""How a state array is stored: encode float32 to codes, decode codes to float32.

Contract: section F. A `Format` is all that a transform knows of storage, and it knows nothing of transforms.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from halfstep_jax.float_formats import FLOAT_FORMATS
from halfstep_jax.rounding import round_to

PLAIN_STATE_DTYPES = ("float32", "bfloat16", "float16")
ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")


@dataclasses.dataclass(frozen=True)
class Format:
    """A plain state dtype, elementwise and with no scale: codes are arrays of `dtype`."""

    dtype: str

    def zeros_like(self, p) -> jax.Array:
        """Return the codes of zeros in the shape, and the sharding, of `p`."""
        return jnp.zeros_like(p, dtype=self.dtype)

    def encode(self, x: jax.Array, words: jax.Array | None) -> jax.Array:
        """Round the float32 `x` to codes: finite values saturate, infinity becomes NaN (contract R6).

        Args:
            x: float32.
            words: uint32 words for stochastic rounding, or None for nearest.
        """
        return round_to(x, self.dtype, words, saturate=True)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of `codes`: exact."""
        return codes.astype(jnp.float32)

    def freezes(self, b: float) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short of its mean: 1 - b < 2^-(p + 1).

        p is the number of explicit mantissa bits; 2^-(p + 1) is half the largest relative gap between
        neighbours. float32 is taken as never freezing (contract F3).
        """
        if self.dtype == "float32":
            return False
        return bool(np.float32(1) - np.float32(b) < np.float32(2.0**-self._gap_bits))

    @property
    def rounds(self) -> bool:
        """Whether storing rounds at all, so that a word is of use."""
        return self.dtype != "float32"

    @property
    def _gap_bits(self) -> int:
        return FLOAT_FORMATS[self.dtype].mantissa_bits + 1


def as_format(function: str, argument: str, dtype) -> Format:
    """Return the `Format` of a plain state dtype, given by name, as a dtype or as a `Format`.

    Args:
        function: whose argument it is, and
        argument: which one, for the error.
        dtype: the dtype.

    Raises:
        TypeError: if it is no dtype.
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
