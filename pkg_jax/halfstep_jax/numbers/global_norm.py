"""The norm of many arrays at once: in float32, or by sums of integers, which no order of adding can change.

Contract: N1, N2.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.meshes.placement import with_auto_axes
from halfstep_jax.numbers.norms import AxisNames, Norms, cut_axes, over_axes, power_of_two
from halfstep_jax.numbers.roots import sqrt

_INFINITY = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x7FFFFF)
# Numbers below 2^24 with a sum below 2^32, and numbers below 2^16.
_CHUNK, _GROUP = 1 << 8, 1 << 16
# Of 16 bits: squares of 48 bits, of up to 2^48 elements.
_LIMBS = 6


def global_norm(arrays: Sequence[jax.Array], *, exact: bool = False, axis_names: AxisNames = ()) -> jax.Array:
    """Return the Euclidean norm of all elements of all arrays in float32 (contract N1).

    XLA computes the sum, and rounds it in its own order; with `exact` it adds integers (contract N2).

    Example:
        >>> print(global_norm([jnp.array([3e-30]), jnp.array([[-4e-30]])], exact=True))
        5e-30
    """
    return global_norms(arrays, exact=exact, axis_names=axis_names).whole


def global_norms(arrays: Sequence[jax.Array], *, exact: bool = False, axis_names: AxisNames = ()) -> Norms:
    """Return the norm of all elements of all arrays, and the norm of 2^-64 times them."""
    arrays = [x.astype(jnp.float32) for x in map(jnp.asarray, arrays) if x.size]
    if not arrays:
        return Norms(*jnp.zeros([2], jnp.float32))
    axes = tuple(cut_axes(x, axis_names) for x in arrays)
    if exact:
        return with_auto_axes(functools.partial(_exact_norms, axes), arrays)
    return _float_norms(axes, arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _exact_norms(axes: tuple[tuple[str, ...], ...], arrays: list[jax.Array]) -> Norms:
    """Return the norm by sums of integers; to a derivative it is that by sums of floats."""
    return _exact_norm(axes, arrays)


@_exact_norms.defjvp
def _(axes, primals, tangents):
    _, of_floats = jax.jvp(functools.partial(_float_norms, axes), primals, tangents)
    return _exact_norms(axes, *primals), of_floats


def _float_norms(axes: tuple[tuple[str, ...], ...], arrays: list[jax.Array]) -> Norms:
    tops = [over_axes(lax.pmax, jnp.max(jnp.abs(x)), over) for x, over in zip(arrays, axes, strict=True)]
    largest = jnp.max(jnp.stack(tops))
    field = jnp.clip(lax.bitcast_convert_type(largest, jnp.uint32) >> np.uint32(23), 1, 253)
    scaled = [x * power_of_two(np.uint32(254) - field) for x in arrays]
    sums = [over_axes(lax.psum, jnp.sum(x * x), over) for x, over in zip(scaled, axes, strict=True)]
    return Norms.of(sqrt(sum(sums)), field)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _exact_norm(axes: tuple[tuple[str, ...], ...], arrays: list[jax.Array]) -> Norms:
    """Return the norm of float32 numbers by sums of integers, reduced over each array's mesh axes.

    One program outside `jax.jit` too: op by op it would be a hundred.
    """
    patterns = [lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF) for x in arrays]
    tops = [over_axes(lax.pmax, jnp.max(bits), over) for bits, over in zip(patterns, axes, strict=True)]
    largest = jnp.max(jnp.stack(tops))
    field = largest >> np.uint32(23)
    # Arrays that are cut over the same axes are added up together.
    totals = []
    for shared in dict.fromkeys(axes):
        same = [bits for bits, over in zip(patterns, axes, strict=True) if over == shared]
        chunks = [_chunks_of_squares(_integers(bits, field)) for bits in same]
        totals.append(over_axes(lax.psum, _total(jnp.concatenate(chunks, axis=1)), shared))
    root = sqrt(_as_float32(_carried(sum(totals[1:], totals[0]))))
    special = jnp.where(largest == _INFINITY, np.float32(np.inf), np.float32(np.nan))
    root = jnp.where(largest >= _INFINITY, special, root * np.float32(2.0**-23))
    return Norms.of(jnp.where(field == 0, np.float32(0), root), field)


def _integers(bits: jax.Array, field: jax.Array) -> jax.Array:
    """Return numbers in units of the last place of the largest, to nearest, halves up; subnormals as 0."""
    exponents = bits >> np.uint32(23)
    mantissa = jnp.where(exponents > 0, (bits & _MANTISSA) | np.uint32(1 << 23), np.uint32(0))
    shift = jnp.minimum(field - exponents, np.uint32(25))
    return (mantissa + ((np.uint32(1) << shift) >> np.uint32(1))) >> shift


def _chunks_of_squares(r: jax.Array) -> jax.Array:
    """Return sums over chunks of high^2, high low and low^2, r = 2^12 high + low: uint32 (3, chunks)."""
    chunks = jnp.pad(r.reshape(-1), (0, -r.size % _CHUNK)).reshape(-1, _CHUNK)
    high, low = chunks >> np.uint32(12), chunks & np.uint32(0xFFF)
    products = (high * high, high * low, low * low)
    return jnp.stack([jnp.sum(x, axis=1, dtype=jnp.uint32) for x in products])


def _total(chunks: jax.Array) -> jax.Array:
    """Return the sum of all r^2 as limbs of 16 bits, the lowest first."""
    high = jnp.zeros((_LIMBS - 2, *chunks.shape), jnp.uint32)
    limbs = jnp.concatenate([(chunks & np.uint32(0xFFFF))[None], (chunks >> np.uint32(16))[None], high])
    while limbs.shape[2] > 1:
        group = min(limbs.shape[2], _GROUP)
        padded = jnp.pad(limbs, ((0, 0), (0, 0), (0, -limbs.shape[2] % group)))
        limbs = _carried(jnp.sum(padded.reshape(_LIMBS, 3, -1, group), axis=3, dtype=jnp.uint32))
    top, middle, bottom = limbs[:, 0, 0], limbs[:, 1, 0], limbs[:, 2, 0]
    # r^2 = 2^24 high^2 + 2^13 high low + low^2, and a shift by 24 is one limb and 8 bits.
    shifted = jnp.concatenate([jnp.zeros(1, jnp.uint32), top[:-1] << np.uint32(8)])
    return _carried(shifted + (middle << np.uint32(13)) + bottom)


def _carried(limbs: jax.Array) -> jax.Array:
    """Return the same number with every limb below 2^16."""
    carry, whole = jnp.zeros_like(limbs[0]), []
    for limb in limbs:
        total = limb + carry
        whole.append(total & np.uint32(0xFFFF))
        carry = total >> np.uint32(16)
    return jnp.stack(whole)


def _as_float32(limbs: jax.Array) -> jax.Array:
    """Return the top 32 bits of a number as float32, in their place."""
    place = jnp.arange(_LIMBS)
    highest = jnp.max(jnp.where(limbs > 0, place, 0))
    padded = jnp.concatenate([jnp.zeros(2, jnp.uint32), limbs])
    top, second, third = (padded[highest + k] for k in (2, 1, 0))
    zeros = lax.clz(top) - np.uint32(16)
    # In two steps: a shift by 32 would not be defined.
    third = (third >> (np.uint32(15) - zeros)) >> np.uint32(1)
    bits = (top << (np.uint32(16) + zeros)) | (second << zeros) | third
    field = 127 + 16 * (highest - 1) - zeros.astype(jnp.int32)
    return bits.astype(jnp.float32) * power_of_two(field.astype(jnp.uint32))
