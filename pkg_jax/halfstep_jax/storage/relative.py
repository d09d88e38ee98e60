"""A first moment in units of the root of the second one: `relative`, and the arithmetic of the unit.

Contract: F12, F13. Adam divides a first moment by the root of the second: in that unit it is bounded, and so
needs no scale.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.numbers.roots import divide, sqrt
from halfstep_jax.storage.blocks import BlockSize
from halfstep_jax.storage.fine_codes import FINE_CODES, FIXED_CODES
from halfstep_jax.storage.formats import Format
from halfstep_jax.storage.state_dtypes import dtype_name, listed, with_blocks
from halfstep_jax.xla.exact import opaque

LARGEST_BOUND = 7.5
"""What codes without a scale hold."""
_SMALLEST_NORMAL = np.float32(2.0**-126)


def relative(
    dtype: jax.typing.DTypeLike, block_size: BlockSize = None, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of a first moment in units of the root of the second one.

    With v the second moment as it is stored in the same step, what is rounded and stored is

        z = m / sqrt(v),   |z| <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),   7.27 at b1 = 0.9, b2 = 0.999

    and what a step goes on with is z sqrt(v). That is what an update is made of, so that an error of z is an
    error of the update of the same size wherever the gradients are large or small. Because of the bound 8
    bits need no scale at all. Rounds once, z; the quotient, the root and the product are float32's.

    Args:
        dtype: without a block size "float8_e3m4" (the better one, in uint8) or "int8", in steps of 1/16; with
            one "int8" or "int4" (two to a byte, dithered: with one random number per array and step added
            before rounding and subtracted after it).
        block_size: None for no scales, also for small arrays; else as in `scaled`, elements of a block or
            "row". The scales have three significant bits.
        min_size: with scales, arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.

    Returns:
        A `Format`, for `mu_dtype=` of rules with a second moment: `adam`, `adamw`, `lamb`, `lamb16`.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if there is no such format or block size; from a rule, if it has no second moment, or if
            without scales its rates have no bound below 7.5.

    Example:
        >>> from halfstep_jax import scale_by_adam
        >>> tx = scale_by_adam(mu_dtype=relative("float8_e3m4"), nu_dtype="ufloat8_e6m2")
        >>> tx.init({"w": jnp.ones(3)}).mu["w"]
        Array([0, 0, 0], dtype=uint8)

    Source: ours (contract F12 to F15); the bound is Cauchy's and Schwarz's inequality. Subtractive dither: L.
    Roberts, "Picture coding using pseudo-random noise", IRE Trans. Inf. Theory 8(2), 1962.
    """
    name = dtype if isinstance(dtype, str) and dtype == "int4" else dtype_name(dtype)
    names = FIXED_CODES if block_size is None else FINE_CODES
    if name not in names:
        raise ValueError(
            f"relative: dtype={name} with block_size={block_size} is not a format. Use {listed(names)}."
        )
    if block_size is None:
        return Format(name, relative=True)
    return with_blocks("relative", name, block_size, min_size, min_ndim).replace(scale="fine", relative=True)


def to_unit(m: jax.Array, v: jax.Array, zero: jax.Array) -> jax.Array:
    """Return z = m / sqrt(v), and 0 where v is 0 or subnormal: rounded twice.

    Args:
        m: float32, the first moment.
        v: float32, the second moment as it was stored.
        zero: for `exact.opaque`.
    """
    z = divide(m, lax.platform_dependent(v, zero, cpu=_another_root, tpu=_another_root, default=_root))
    return jnp.where(v < _SMALLEST_NORMAL, np.float32(0), z)


def _another_root(v: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the root of v, which no compiler knows to be that.

    XLA on CPU keeps a root that has two uses as an array of its own, and takes two roots of the same for one:
    here is a root of something else. And a quotient by a bare root would be a product with its rsqrt.
    """
    return opaque(sqrt(opaque(v, zero)), zero)


def _root(v: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the root of v, the one of `from_unit`: on a GPU a correction stands behind it."""
    del zero
    return sqrt(v)


def from_unit(z: jax.Array, v: jax.Array) -> jax.Array:
    """Return m = z sqrt(v): rounded twice."""
    return z * sqrt(v)


def bound(b1: float, b2: float) -> float:
    """Return the largest |z| of averages of g and g g, by Cauchy and Schwarz; infinity if there is none.

    Example:
        >>> round(bound(0.9, 0.999), 2)
        7.27
    """
    if b1 * b1 >= b2:
        return math.inf
    return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
