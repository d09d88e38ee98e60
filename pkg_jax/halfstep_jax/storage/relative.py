"""A first moment in units of the root of the second one: `relative`, and the arithmetic of the unit.

Contract: F12, F13, F18. Adam divides a first moment by the root of the second: in that unit it is bounded,
and so needs no scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage import relative as shared
from halfstep.storage.formats import returning
from halfstep.storage.fourth_roots import inverse_power_of_root, power_of_root
from halfstep_jax.numbers.arrays import JaxArrays, as_int32
from halfstep_jax.numbers.roots import divide, sqrt
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_jax.xla.exact import opaque

_SMALLEST_NORMAL = np.float32(2.0**-126)


relative = returning(Format, shared.relative)


def into_unit(fmt: shared.Format, m: jax.Array, v: jax.Array, nu: Encoded, zero: jax.Array) -> jax.Array:
    """Return a first moment in the unit of its format.

    Args:
        fmt: of the first moment.
        m: float32, the first moment.
        v: float32, the second moment as it was stored, and
        nu: its stored form.
        zero: for `exact.opaque`.
    """
    if fmt.power_unit:
        return m * inverse_power_of_root(JaxArrays(), as_int32(nu.codes))
    return within_scales(to_unit(m, v, zero), fmt)


def out_of_unit(fmt: shared.Format, z: jax.Array, v: jax.Array, nu: Encoded) -> jax.Array:
    """Return a first moment, given it in the unit of its format: see `into_unit`."""
    return z * power_of_root(JaxArrays(), as_int32(nu.codes)) if fmt.power_unit else from_unit(z, v)


def to_unit(m: jax.Array, v: jax.Array, zero: jax.Array) -> jax.Array:
    """Return z = m / sqrt(v), and 0 where v is 0 or subnormal: rounded twice."""
    z = divide(m, _another_root(v, zero))
    return jnp.where(v < _SMALLEST_NORMAL, np.float32(0), z)


def _another_root(v: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the root of v, which no compiler knows to be that.

    XLA keeps a root that has two uses as an array of its own, and takes two roots of the same for one: here
    is a root of something else. And a quotient by a bare root would be a product with its rsqrt.
    """
    return opaque(sqrt(opaque(v, zero)), zero)


def within_scales(z: jax.Array, fmt: shared.Format) -> jax.Array:
    """Return finite z clipped to the largest number that a fine scale holds; past it a block would be NaN."""
    if not fmt.scaled:
        return z
    largest = np.float32(shared.largest(fmt))
    return jnp.where(jnp.abs(z) < np.float32(np.inf), lax.clamp(-largest, z, largest), z)


def from_unit(z: jax.Array, v: jax.Array) -> jax.Array:
    """Return m = z sqrt(v): rounded twice."""
    return z * sqrt(v)
