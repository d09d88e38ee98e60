"""Random words: one uint32 per element, a pure function of (seed, step, leaf, role, index).

Contract: section W. Nothing is drawn and nothing is kept: JAX's keys, generators and settings play no part.
A sharded array has the words of the whole array; each device computes its own, without
communication.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.random_words import (
    FIELD_SHIFTS,
    GOLDEN_RATIO,
    in_range,
    leaf_number,
    mix,
    threefry2x32,
    word_role,
)
from halfstep.storage.blocks import BlockSize, block_layout
from halfstep_jax.leaf_calls import call_per_shape, given_places
from halfstep_jax.numbers.arrays import JaxArrays
from halfstep_jax.numbers.seeds import seed_words
from halfstep_jax.xla.exact import opaque_zero
from halfstep_jax.xla.shards import Shard, vary_together, whole_shape

_LOW_HALF = np.uint32(0xFFFF)


@dataclasses.dataclass(frozen=True)
class LeafKey:
    """The keys of one leaf at one step.

    Attributes:
        roles: of the keys.
        k0: uint32 scalar, odd, shared by all roles.
        k1: a uint32 scalar of each role.
        zero: for `exact.opaque`.
        shard: which part of the leaf its arrays are; None where they are whole.
    """

    roles: tuple[int, ...]
    k0: jax.Array
    k1: tuple[jax.Array, ...]
    zero: jax.Array
    shard: Shard | None = None

    def words(self, role: int, shape: Sequence[int], offset: int = 0) -> jax.Array:
        """Return the words of a role for rounding, with its field at the top (contract W6, W8).

        Args:
            role: with a `word_role` among `roles`.
            shape: of the result.
            offset: row-major index of its first element, in [0, 2^64).

        Raises:
            ValueError: if the leaf is a shard, and it is not known which.
        """
        words = call_per_shape(_words, (tuple(shape), offset, self.shard), self.k0, self._k1(role))
        shift = FIELD_SHIFTS.get(role, 0)
        return words << np.uint32(shift) if shift else words

    def block_words(self, role: int, shape: Sequence[int], block_size: BlockSize) -> jax.Array:
        """Return for every element the unmixed word of its block (contract F15).

        Made of an element's index alone, so that no word is moved from one element to others.

        Args:
            role: with a `word_role` among `roles`.
            shape: of the result.
            block_size: of the blocks, each of which is whole here.

        Raises:
            ValueError: if the leaf is a shard, and it is not known which.
        """
        elements = tuple(shape), self.shard, block_size
        return call_per_shape(_block_words, elements, self.k0, self._k1(role))

    def _k1(self, role: int) -> jax.Array:
        if self.shard is not None:
            self.shard.check()
        return self.k1[self.roles.index(word_role(role))]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k0", "k1", "zero"], meta_fields=["roles"])
@dataclasses.dataclass(frozen=True)
class LeafKeys:
    """The keys of n leaves at one step.

    Attributes:
        roles: of the keys.
        k0: uint32[len(roles), n], all rows alike.
        k1: uint32[len(roles), n].
        zero: for `exact.opaque`: a uint32 scalar out of the loop of the keys.
    """

    roles: tuple[int, ...]
    k0: jax.Array
    k1: jax.Array
    zero: jax.Array

    def of_leaf(self, index) -> LeafKey:
        """Return the key of one leaf.

        Args:
            index: one of `indices`.
        """
        index, shard = index if isinstance(index, tuple) else (index, None)
        # The index stays an operand: XLA then compiles the step of leaves of one shape once, and not for each
        # index. For that it may neither know the index nor take it for a scalar, which it would copy in.
        column = lax.index_in_dim(jnp.asarray(index) | self.zero, 0, keepdims=False)
        k0 = _element(self.k0, 0, column)
        k1 = tuple(_element(self.k1, row, column) for row in range(len(self.roles)))
        return LeafKey(self.roles, k0, k1, self.zero, shard)

    def indices(self, shards: Sequence[Shard | None] | None = None) -> list:
        """Return the index of every leaf for `of_leaf`, in a vector that XLA takes for no broadcast or iota.

        Args:
            shards: which part each leaf is, from `shards`; None: they are whole.
        """
        indices = [np.array([i, 0, 2], np.uint32) for i in range(self.k0.shape[1])]
        if shards is None:
            return indices
        return [i if shard is None else (i, shard) for i, shard in zip(indices, shards, strict=True)]


def random_words(
    seed: jax.typing.ArrayLike,
    step: jax.typing.ArrayLike,
    leaf: str | int,
    role: int,
    shape: Sequence[int],
    offset: int = 0,
) -> jax.Array:
    """Return one word per element of an array, a pure function of all arguments (contract W1 to W8).

    Rounding takes the top 16 bits, where the field of the role is. Nothing is drawn.

    Args:
        seed: an integer in [0, 2^64), or two uint32 words (high, low). May be traced.
        step: the count after its increment; 1 at the first update. May be traced.
        leaf: the leaf's name (contract W7), or its uint32 id.
        role: a `Role`, or that of a further moment (`role_of`).
        shape: of the array, or of the part of it that starts at `offset`.
        offset: row-major index of the first element, an integer in [0, 2^64).

    Raises:
        TypeError: if `seed` is no seed.
        ValueError: if `seed`, `leaf`, `role` or `offset` is out of range.

    Example:
        >>> from halfstep_jax import Role
        >>> words = random_words(seed=0, step=1, leaf="layer/kernel", role=Role.PARAM, shape=(2, 3))
        >>> part = random_words(seed=0, step=1, leaf="layer/kernel", role=Role.PARAM, shape=(3,), offset=3)
        >>> bool((words[1] == part).all())
        True

    Source: ours (contract W).
    """
    offset, role = in_range("offset", offset, 64), in_range("role", role, 32)
    keys = leaf_keys(seed_words("random_words", seed), step, [leaf_number(leaf)], (word_role(role),))
    words = keys.of_leaf(keys.indices()[0]).words(word_role(role), shape, offset)
    shift = FIELD_SHIFTS.get(role, 0)
    return (words << np.uint32(shift)) | (words >> np.uint32(32 - shift)) if shift else words


def leaf_keys(seed: jax.Array | np.ndarray, step, leaves: Sequence[int], roles: Sequence[int]) -> LeafKeys:
    """Return the keys of `leaves` for `roles` (contract W4).

    (k, kx) = fold(fold(seed, step), leaf); k0 = k | 1; k1 = the second word of fold((k, kx), role).

    They come from one rolled loop of three turns over small vectors. XLA would fuse an unrolled Threefry into
    every kernel that uses a word. The result of a rolled loop is also not folded, which `exact.opaque_zero`
    needs. The loop works on vectors, because a fold for each leaf takes minutes to compile.

    Args:
        seed: uint32[2], (high, low).
        step: integer scalar, the count after its increment.
        leaves: ids of n leaves, from `leaf_id`.
        roles: at least one.
    """
    shape = (len(roles), len(leaves))
    step = jnp.asarray(step).astype(jnp.uint32)
    leaf = np.asarray(leaves, np.uint32)
    role = np.asarray(roles, np.uint32)[:, None]
    numbers = jnp.stack([jnp.broadcast_to(number, shape) for number in (step, leaf, role)])
    first, second = (jnp.broadcast_to(seed[i], shape) for i in range(2))
    start = [first, second, jnp.zeros(shape, jnp.uint32), jnp.asarray(seed[1])]
    # Seeds may differ by device inside `jax.shard_map`.
    *start, numbers = vary_together([*start, numbers])
    (_, k1, k0, zero), _ = lax.scan(_fold, tuple(start), numbers)
    return LeafKeys(tuple(map(int, roles)), k0, k1, zero & np.uint32(1))


def _fold(carry, number):
    """Fold `number` into a key; keep k0 of the key before.

    Beside it a word becomes an opaque zero: made in the loop, no kernel that reads it makes it again. At
    module level, so that op by op it compiles once.
    """
    first, second, _, word = carry
    new_first, new_second = threefry2x32((first, second), (jnp.zeros_like(number), number))
    return (new_first, new_second, first | np.uint32(1), opaque_zero(word)), None


def _element(table: jax.Array, row: int, column: jax.Array) -> jax.Array:
    return lax.dynamic_slice(table, (np.uint32(row), column), (1, 1)).reshape(())


def _words(elements: tuple, k0: jax.Array, k1: jax.Array) -> jax.Array:
    """Return the words of elements, given the arguments of `_index`: shape, offset and shard."""
    hi, lo = _index(*elements)
    k1 = k1 if hi is None else k1 + GOLDEN_RATIO * hi
    mixed = mix(JaxArrays(), lax.bitcast_convert_type(lo * k0 + k1, jnp.int32))
    return lax.bitcast_convert_type(mixed, jnp.uint32)


def _block_words(elements: tuple, k0: jax.Array, k1: jax.Array) -> jax.Array:
    """Return k1 + k0 times the index of each block's first element, given shape, shard and block size."""
    shape, shard, block_size = elements
    leading, run, block = block_layout(shape, block_size)
    if (places := given_places()) is not None:
        firsts = jnp.broadcast_to(places.firsts[block][..., None], (*leading, run // block, block))
        return firsts.reshape(shape) * k0 + k1
    hi, lo = _index(shape, 0, shard)
    axes = len(leading)
    # Blocks of a shard are whole, so that a place in one is the same in the shard as in the whole array.
    _, within = _index((1,) * axes + shape[axes:], 0)
    power = block > 0 and block & (block - 1) == 0
    within = within & np.uint32(block - 1) if power else within % np.uint32(max(block, 1))
    if hi is not None:
        k1 = k1 + GOLDEN_RATIO * (hi - (lo < within).astype(jnp.uint32))
    return (lo - within) * k0 + k1


def _index(shape: tuple[int, ...], offset: int, shard: Shard | None = None):
    """Return (hi, lo): the row-major index of each element plus `offset`, in two uint32 halves.

    By one iota per axis, so that a sharded array needs nothing from another device. hi is a scalar where it
    is the same for all, and None where that is 0: always, but for more than 2^32 elements or an offset near
    a multiple of that.
    """
    if (places := given_places()) is not None:
        return None, places.index
    whole = whole_shape(shard, shape)
    size = math.prod(whole)
    hi, lo = (jnp.uint32(offset // 2**32) if offset // 2**32 else None), None
    stride = size
    for axis, length in enumerate(whole if size else ()):
        stride //= length
        if length == 1:
            continue
        position = lax.broadcasted_iota(jnp.uint32, shape, axis)
        if shard is not None:
            position = position + shard.first(axis)
        step = position if stride == 1 else position * np.uint32(stride % 2**32)
        lo = step if lo is None else lo + step
        if size > 2**32:
            hi = _sum(hi, _product_high(position, stride) + (lo < step).astype(jnp.uint32))
        if length > 2**32:
            hi = _sum(hi, _position_high(position, axis) * np.uint32(stride % 2**32))
    lo = jnp.zeros(shape, jnp.uint32) if lo is None else lo
    if offset:
        low = np.uint32(offset % 2**32)
        lo = lo + low
        if offset % 2**32 + size > 2**32:
            hi = _sum(hi, (lo < low).astype(jnp.uint32))
    return hi, lo


def _sum(x: jax.Array | None, y: jax.Array) -> jax.Array:
    return y if x is None else x + y


def _product_high(x: jax.Array, factor: int) -> jax.Array:
    """Return the upper half of `x * factor`, the product being below 2^64: by digits of 16 bits."""
    high, low = np.uint32(factor // 2**32), factor % 2**32
    a1, a0 = x >> np.uint32(16), x & _LOW_HALF
    b1, b0 = np.uint32(low >> 16), np.uint32(low & 0xFFFF)
    middle = a1 * b0 + ((a0 * b0) >> np.uint32(16))
    other = a0 * b1 + (middle & _LOW_HALF)
    return a1 * b1 + (middle >> np.uint32(16)) + (other >> np.uint32(16)) + x * high


def _position_high(low: jax.Array, axis: int) -> jax.Array:
    """Return the upper half of the position along an axis so long that a uint32 iota wraps, given the lower.

    A float32 iota is off by 2^-24 of the position, so the whole turns that `low` lacks are beyond doubt.
    """
    about = lax.broadcasted_iota(jnp.float32, low.shape, axis)
    turns = (about - low.astype(jnp.float32)) * np.float32(2.0**-32)
    return jnp.round(turns).astype(jnp.uint32)
