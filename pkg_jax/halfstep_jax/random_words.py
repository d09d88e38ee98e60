"""Random words: one uint32 per element, a pure function of (seed, step, leaf, role, index).

Contract: section W. Nothing is drawn and nothing is kept: JAX's generators, keys and settings play no part. An array
that is sharded gets the words of the whole array, each device computing its own.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.seeds import seed_words


class Role(enum.IntEnum):
    """What a word is used for: streams of one leaf and step that must not be shared (contract W6)."""

    PARAM = 0
    MU = 1
    NU = 2
    ACCUMULATOR = 3
    STATE = 4


class LeafKeys(NamedTuple):
    """Keys of n leaves at one step.

    Attributes:
        k0: uint32[n], shared by all roles of a leaf.
        k1: uint32[roles, n], one row per role, in the order asked for.
    """

    k0: jax.Array
    k1: jax.Array


# Random123, threefry.h: R_32x2_*, alternating between groups of four rounds.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_GOLDEN_RATIO = 0x9E3779B9


def threefry2x32(key, counter):
    """Encrypt `counter` under `key` with Threefry-2x32 in 20 rounds, elementwise.

    Args:
        key: two uint32 arrays.
        counter: two uint32 arrays.

    Returns:
        Two uint32 arrays.

    Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 4.2.
    """
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = counter[0] + k0, counter[1] + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def leaf_id(name: str) -> int:
    """Return the 32-bit FNV-1a hash of the UTF-8 bytes of a leaf's name (contract W7).

    Example:
        >>> hex(leaf_id("layer/kernel"))
        '0x…'

    Source: Fowler, Noll, Vo, "The FNV non-cryptographic hash algorithm", draft-eastlake-fnv, section 2.
    """
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) % 2**32
    return value


def leaf_keys(seed: jax.Array, step, leaves: Sequence[int], roles: Sequence[int]) -> LeafKeys:
    """Return the keys of `leaves` for `roles`: three folds, in one rolled loop over small vectors (contract W4).

    Rolled, because XLA would fuse an unrolled Threefry into every kernel that uses a word, and so that a compiler
    cannot fold the keys even where seed and step are constants (`exact.hidden_zero` rests on that).

    Args:
        seed: uint32[2], (high, low).
        step: integer scalar, the count after its increment.
        leaves: ids of n leaves, from `leaf_id`.
        roles: at least one `Role`.
    """
    shape = (len(roles), len(leaves))
    numbers = jnp.stack(
        [
            jnp.broadcast_to(jnp.asarray(step).astype(jnp.uint32), shape),
            jnp.broadcast_to(np.asarray(leaves, np.uint32), shape),
            jnp.broadcast_to(np.asarray(roles, np.uint32)[:, None], shape),
        ]
    )

    def fold(key, number):
        key = threefry2x32(key, (jnp.zeros_like(number), number))
        return key, key

    start = (jnp.broadcast_to(seed[0], shape), jnp.broadcast_to(seed[1], shape))
    _, (firsts, seconds) = lax.scan(fold, start, numbers)
    return LeafKeys(k0=firsts[1, 0], k1=seconds[2])


def mix(x: jax.Array) -> jax.Array:
    """Return the two-multiply finaliser of uint32 `x` (contract W8).

    Source: C. Wellons, hash-prospector, "lowbias32" (2018), with his later constants 0x7feb352d, 0x846ca68b.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def words_of_key(k0: jax.Array, k1: jax.Array, shape: Sequence[int], offset: int = 0) -> jax.Array:
    """Return mix(mix(lo ^ k0) + k1 + 0x9E3779B9 hi), (hi, lo) the row-major index of each element plus `offset`.

    Args:
        k0: uint32 scalar, of the leaf.
        k1: uint32 scalar, of the role.
        shape: of the result.
        offset: in [0, 2^64).
    """
    hi, lo = _index(tuple(shape), offset)
    return mix(mix(lo ^ k0) + (k1 + np.uint32(_GOLDEN_RATIO) * hi))


def random_words(seed, step, leaf: str | int, role: int, shape: Sequence[int], offset: int = 0) -> jax.Array:
    """Return one word per element of an array: mix(mix(lo ^ k0) + k1 + 0x9E3779B9 hi).

    (hi, lo) are the two halves of the 64-bit row-major index of the element in the whole array, (k0, k1) the keys of
    (seed, step, leaf, role). Consumers take the top bits.

    Args:
        seed: an integer in [0, 2^64), or two uint32 words (high, low).
        step: the count after its increment; 1 at the first update. May be traced.
        leaf: the leaf's name (contract W7), or its uint32 id.
        role: a `Role`.
        shape: of the array, or of the part of it that starts at `offset`.
        offset: row-major index of the first element, an integer in [0, 2^64).

    Returns:
        uint32, of `shape`.

    Raises:
        ValueError: if `seed` is out of range.

    Example:
        >>> random_words(seed=0, step=1, leaf="w", role=Role.PARAM, shape=(2,)).dtype
        dtype('uint32')

    Source: ours (contract W).
    """
    leaf = leaf_id(leaf) if isinstance(leaf, str) else leaf
    keys = leaf_keys(seed_words("random_words", seed), step, [leaf], [role])
    return words_of_key(keys.k0[0], keys.k1[0, 0], shape, offset)


def _index(shape: tuple[int, ...], offset: int):
    """Return (hi, lo) of the row-major index plus `offset`; hi is a scalar where it is the same for all."""
    size = int(np.prod(shape, dtype=object)) if shape else 1
    lo = jnp.zeros(shape, jnp.uint32)
    stride = size
    for axis, length in enumerate(shape):
        stride = stride // length if length else 0
        lo = lo + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    lo = lo + np.uint32(offset & 0xFFFFFFFF)
    return np.uint32(offset >> 32), lo
