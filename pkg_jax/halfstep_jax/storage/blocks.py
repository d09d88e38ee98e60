"""How an array is cut into blocks that share a scale.

Contract: F4, F11. A block never leaves the trailing axes that it runs along, so an array that is sharded
along leading axes keeps its blocks whole, each on one device.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.numbers.exact import computed_once
from halfstep_jax.numbers.shards import Shard

BlockSize = int | str | None
"""A number of elements, "row" (one block per last-axis row) or None (one block in all)."""
# A TPU keeps the last two axes in tiles of 8 rows. In that order of axes a block is whole in memory, and XLA
# takes its maximum while it computes the elements; cut out of the rows, it first moves every array, twice.
_TILE_ROWS, _TILE_COLUMNS = 8, 128


def block_layout(shape: tuple[int, ...], block_size: BlockSize) -> tuple[tuple[int, ...], int, int]:
    """Return (leading shape, length of a run, block size) of an array.

    A run is the shortest run of trailing axes whose product reaches `block_size`, or all axes where none
    does; blocks stand along it, and the last one of a run may be short.

    Example:
        >>> block_layout((64, 32, 3, 3), 128)
        ((64,), 288, 128)
    """
    if block_size is None:
        return (), math.prod(shape), math.prod(shape)
    if block_size == "row":
        row = shape[-1] if shape else 1
        return shape[:-1], row, row
    assert isinstance(block_size, int)
    axes = min(1, len(shape))
    while axes < len(shape) and math.prod(shape[len(shape) - axes :]) < block_size:
        axes += 1
    return shape[: len(shape) - axes], math.prod(shape[len(shape) - axes :]), block_size


def scale_shape(shape: tuple[int, ...], block_size: BlockSize) -> tuple[int, ...]:
    """Return the shape of the scales: the leading shape, and the number of blocks of a run.

    Example:
        >>> scale_shape((64, 32, 3, 3), 128)
        (64, 3)
    """
    leading, run, block = block_layout(shape, block_size)
    return (*leading, -(-run // block) if block else 0)


def check_blocks(caller: str, name: str, shard: Shard | None, block_size: BlockSize) -> None:
    """Refuse a cut through blocks that share a scale.

    Args:
        caller: the link, and
        name: the leaf, for the error.
        shard: which part the array is.
        block_size: of its format.

    Raises:
        ValueError: naming the leaf.
    """
    if shard is None:
        return
    leading, run, _ = block_layout(shard.shape, block_size)
    whole_leading, _, block = block_layout(shard.whole, block_size)
    axis = len(whole_leading)
    # Cut along the first axis of the run, parts of it stay in one piece; they must be of whole blocks.
    in_one_piece = len(leading) == axis and all(n == 1 for n in shard.pieces[axis + 1 :])
    if any(n > 1 for n in shard.pieces[axis:]) and (not in_one_piece or run % block):
        raise ValueError(
            f"{caller}: inside jax.shard_map '{name}' is {list(shard.shape)} of {list(shard.whole)}, and the "
            f"cut goes through blocks (block_size={block_size!r}), whose scales this device alone cannot "
            "find. Cut leading axes, or the first axis of a run at a multiple of block_size; or step under "
            "jax.jit."
        )


def first_elements(x: jax.Array, block_size: BlockSize) -> jax.Array:
    """Return the first element of every block: in the shape of the scales, and sharded as they should be."""
    leading, run, block = block_layout(x.shape, block_size)
    return x.reshape(*leading, run)[..., :: max(block, 1)]


def block_maximum(x: jax.Array, block_size: BlockSize, not_finite: float = 0.0) -> jax.Array:
    """Return the largest magnitude of every block.

    Args:
        x: float32.
        block_size: of `x`.
        not_finite: what a NaN or an infinity counts as.

    Example:
        >>> block_maximum(jnp.array([1.0, -4.0, jnp.nan, 2.0, 3.0]), 2).tolist()
        [4.0, 2.0, 3.0]
    """
    leading, run, block = block_layout(x.shape, block_size)
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < np.float32(np.inf), magnitude, np.float32(not_finite))
    rows = magnitude.reshape(*leading, run)
    return lax.platform_dependent(
        rows,
        cpu=functools.partial(_maximum_by_halves, block=block, once=not_finite > 0),
        tpu=functools.partial(_maximum_by_tiles, block=block),
        default=functools.partial(_maximum, block=block),
    )


def per_element(scales: jax.Array, shape: tuple[int, ...], block_size: BlockSize) -> jax.Array:
    """Return the scale of every element, in the array's shape.

    Example:
        >>> per_element(jnp.array([[1], [2]]), (2, 3), "row").tolist()
        [[1, 1, 1], [2, 2, 2]]
    """
    _, run, block = block_layout(shape, block_size)
    repeated = lax.platform_dependent(
        scales,
        tpu=functools.partial(_repeated_by_tiles, block=block),
        default=functools.partial(_repeated, block=block),
    )
    return repeated[..., :run].reshape(shape)


def packed_shape(shape: tuple[int, ...], block_size: BlockSize) -> tuple[int, ...]:
    """Return the shape of 4-bit codes, two to a byte: the leading shape, and the bytes of a run.

    Example:
        >>> packed_shape((64, 32, 3, 3), 128), packed_shape((5, 7), "row")
        ((64, 144), (5, 4))
    """
    leading, run, _ = block_layout(shape, block_size)
    return (*leading, -(-run // 2))


def pack(codes: jax.Array, block_size: BlockSize) -> jax.Array:
    """Return 4-bit codes two to a byte, the earlier one in the low half; a run ends with its byte.

    Example:
        >>> pack(jnp.array([[1, 2, 3], [4, 5, 6]], jnp.uint8), "row").tolist()
        [[33, 3], [84, 6]]
    """
    leading, run, _ = block_layout(codes.shape, block_size)
    runs = codes.reshape(*leading, run)
    if run % 2:
        runs = jnp.pad(runs, [(0, 0)] * len(leading) + [(0, 1)])
    return lax.platform_dependent(runs, tpu=_packed_by_tiles, default=_packed)


def unpack(packed: jax.Array, shape: tuple[int, ...], block_size: BlockSize) -> jax.Array:
    """Return the codes of every element of an array of `shape`.

    Example:
        >>> unpack(jnp.array([[33, 3], [84, 6]], jnp.uint8), (2, 3), "row").tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    _, run, _ = block_layout(shape, block_size)
    runs = lax.platform_dependent(packed, tpu=_unpacked_by_tiles, default=_unpacked)
    return runs[..., :run].reshape(shape)


def _packed(runs: jax.Array) -> jax.Array:
    """Return 4-bit codes of runs of even length, two to a byte."""
    pairs = runs.reshape(*runs.shape[:-1], runs.shape[-1] // 2, 2).astype(jnp.uint4)
    # Not by a shift of every second code: XLA then takes elements one at a time, and five times as long.
    packed = lax.bitcast_convert_type(pairs, jnp.uint8)
    # A select: XLA on CPU keeps what one gives, and would make the codes again where they are decoded.
    return jnp.where(packed == 0, np.uint8(0), packed)


def _unpacked(packed: jax.Array) -> jax.Array:
    pairs = lax.bitcast_convert_type(packed, jnp.uint4).astype(jnp.uint8)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _packed_by_tiles(runs: jax.Array) -> jax.Array:
    """Do as `_packed`, by a product of matrices, which is exact: pairs have no place in a TPU's tiles."""
    if not _fills_tiles(runs.shape, runs.shape[-1]) or runs.shape[-1] % (2 * _TILE_COLUMNS):
        return _packed(runs)
    tiles = _in_tiles(runs.astype(jnp.bfloat16), 2 * _TILE_COLUMNS)
    weights = np.kron(np.eye(_TILE_COLUMNS), [[1], [16]]).astype(jnp.bfloat16)
    packed = jnp.matmul(tiles, weights, preferred_element_type=jnp.float32)
    return _out_of_tiles(packed, runs.shape[-2]).astype(jnp.uint8)


def _unpacked_by_tiles(packed: jax.Array) -> jax.Array:
    """Do as `_unpacked`, likewise."""
    if not _fills_tiles(packed.shape, packed.shape[-1]):
        return _unpacked(packed)
    tiles = _in_tiles(packed.astype(jnp.bfloat16), _TILE_COLUMNS)
    weights = np.repeat(np.eye(_TILE_COLUMNS), 2, axis=1).astype(jnp.bfloat16)
    twice = jnp.matmul(tiles, weights, preferred_element_type=jnp.float32)
    both = _out_of_tiles(twice, packed.shape[-2]).astype(jnp.uint8)
    # Shifted by a number: of a select between two shifts XLA would keep both in memory.
    late = lax.broadcasted_iota(jnp.uint8, both.shape, both.ndim - 1) & np.uint8(1)
    return (both >> (np.uint8(4) * late)) & np.uint8(15)


def _in_tiles(rows: jax.Array, columns: int) -> jax.Array:
    """Return rows in the order of a TPU's memory: (..., rows / 8, columns of tiles, 8, `columns`)."""
    *leading, count, run = rows.shape
    padded = jnp.pad(rows, [(0, 0)] * len(leading) + [(0, -count % _TILE_ROWS), (0, 0)])
    return padded.reshape(*leading, -1, _TILE_ROWS, run // columns, columns).swapaxes(-2, -3)


def _out_of_tiles(tiles: jax.Array, count: int) -> jax.Array:
    """Return `count` rows out of what `_in_tiles` gives."""
    *leading, high, across, rows, columns = tiles.shape
    return tiles.swapaxes(-2, -3).reshape(*leading, high * rows, across * columns)[..., :count, :]


def _maximum(rows: jax.Array, block: int) -> jax.Array:
    """Return the maximum of every block. Of floats: of integers, XLA on CPU does not vectorise it."""
    return jnp.max(_cut(rows, block), axis=-1, initial=0)


def _maximum_by_halves(rows: jax.Array, block: int, once: bool) -> jax.Array:
    """Do as `_maximum`. What makes the operand is fused with the halving, but on CPU not with a reduction.

    Args:
        rows: magnitudes.
        block: of elements.
        once: whether the first half is kept. XLA keeps the operand by itself where codes are floats with a
            sign, whose NaN is a code; others it would compute an element at a time, in four times as long.
    """
    blocks = _cut(rows, block)
    width = block
    while width % 2 == 0 and width > 16:
        width //= 2
        blocks = jnp.maximum(blocks[..., :width], blocks[..., width:])
        # A subnormal maximum and zero have the same scale.
        blocks, once = computed_once(blocks) if once else blocks, False
    return jnp.max(blocks, axis=-1, initial=0)


def _maximum_by_tiles(rows: jax.Array, block: int) -> jax.Array:
    """Do as `_maximum`, in the order of a TPU's memory."""
    if not _fills_tiles(rows.shape, block):
        return _maximum(rows, block)
    *leading, count, run = rows.shape
    padded = jnp.pad(rows, [(0, 0)] * len(leading) + [(0, -count % _TILE_ROWS), (0, -run % block)])
    tiles = padded.reshape(*leading, -1, _TILE_ROWS, -(-run // block), block).swapaxes(-2, -3)
    largest = jnp.max(tiles, axis=-1, initial=0).swapaxes(-1, -2)
    return largest.reshape(*leading, -1, largest.shape[-1])[..., :count, :]


def _repeated(scales: jax.Array, block: int) -> jax.Array:
    """Return every scale `block` times along the last axis."""
    repeated = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return repeated.reshape(*scales.shape[:-1], scales.shape[-1] * block)


def _repeated_by_tiles(scales: jax.Array, block: int) -> jax.Array:
    """Do as `_repeated`, in the order of a TPU's memory."""
    if not _fills_tiles(scales.shape, block):
        return _repeated(scales, block)
    *leading, count, blocks = scales.shape
    padded = jnp.pad(scales, [(0, 0)] * len(leading) + [(0, -count % _TILE_ROWS), (0, 0)])
    tiles = padded.reshape(*leading, -1, _TILE_ROWS, blocks).swapaxes(-1, -2)
    repeated = jnp.broadcast_to(tiles[..., None], (*tiles.shape, block)).swapaxes(-2, -3)
    return repeated.reshape(*leading, -1, blocks * block)[..., :count, :]


def _fills_tiles(shape: tuple[int, ...], block: int) -> bool:
    """Whether blocks of rows of this shape fill rows of a TPU's tiles, of 8 by 128 elements."""
    return len(shape) > 1 and block % _TILE_COLUMNS == 0


def _cut(rows: jax.Array, block: int) -> jax.Array:
    """Return rows as blocks."""
    *leading, run = rows.shape
    if block and run % block:
        # Only what the maximum reads is padded: a padded moment would be a copy of it.
        rows = jnp.pad(rows, [(0, 0)] * len(leading) + [(0, -run % block)])
    return rows.reshape(*leading, -(-run // block) if block else 0, block)
