"""Blocks in the order of a TPU's memory, in which XLA need not move an array to cut it.

A TPU keeps the last two axes in tiles of 8 rows and 128 columns: in that order of axes a block of 128 is
whole in memory, and XLA takes its maximum while it computes the elements; cut out of the rows, every array
is moved first, twice. Where it takes less room, columns are kept as rows are otherwise: the array is on end.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, COLUMNS = 8, 128


def cut_by_blocks(shape: tuple[int, ...], block: int) -> bool:
    """Whether rows of this shape are cut between tiles, or could be: a row that is one block needs no cut."""
    return _in_plane(shape) and block % COLUMNS == 0 and (block < shape[-1] or filled(shape))


def has_columns(shape: tuple[int, ...], tiles: int = 1) -> bool:
    """Whether the rows of this shape are a multiple of `tiles` tiles long."""
    return _in_plane(shape) and shape[-1] % (tiles * COLUMNS) == 0


def _in_plane(shape: tuple[int, ...]) -> bool:
    """Whether tiles hold anything: arrays of one axis or without elements have none."""
    return len(shape) > 1 and 0 not in shape


def filled(shape: tuple[int, ...]) -> bool:
    """Whether rows of this shape leave no place in tiles unused.

    Example:
        >>> filled((16, 512)), filled((16, 500)), filled((15, 512))
        (True, False, False)
    """
    return shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


def on_end(shape: tuple[int, ...]) -> bool:
    """Whether a TPU keeps an array of this shape on end, which it does where that takes less room.

    Example:
        >>> on_end((1024, 1000)), on_end((1000, 1000))
        (True, False)
    """
    count, run = shape[-2:]
    return _room(run, count) < _room(count, run)


def _room(count: int, run: int) -> int:
    return -(-count // ROWS) * ROWS * -(-run // COLUMNS) * COLUMNS


def maximum(rows: jax.Array, block: int) -> jax.Array:
    """Return the maximum of every block of rows."""
    *leading, count, run = rows.shape
    padded = jnp.pad(rows, [(0, 0)] * len(leading) + [(0, -count % ROWS), (0, -run % block)])
    tiles = padded.reshape(*leading, -1, ROWS, -(-run // block), block).swapaxes(-2, -3)
    largest = jnp.max(tiles, axis=-1, initial=0).swapaxes(-1, -2)
    return largest.reshape(*leading, -1, largest.shape[-1])[..., :count, :]


def repeated(scales: jax.Array, block: int) -> jax.Array:
    """Return every scale `block` times along the last axis."""
    *leading, count, blocks = scales.shape
    padded = jnp.pad(scales, [(0, 0)] * len(leading) + [(0, -count % ROWS), (0, 0)])
    tiles = padded.reshape(*leading, -1, ROWS, blocks).swapaxes(-1, -2)
    repeated = jnp.broadcast_to(tiles[..., None], (*tiles.shape, block)).swapaxes(-2, -3)
    return repeated.reshape(*leading, -1, blocks * block)[..., :count, :]


def packed(runs: jax.Array) -> jax.Array:
    """Return 4-bit codes of runs two to a byte, by a product of matrices, which is exact.

    Pairs have no place in a TPU's tiles.
    """
    tiles = _in_tiles(runs.astype(jnp.bfloat16), 2 * COLUMNS)
    weights = np.kron(np.eye(COLUMNS), [[1], [16]]).astype(jnp.bfloat16)
    packed = jnp.matmul(tiles, weights, preferred_element_type=jnp.float32)
    return _out_of_tiles(packed, runs.shape[-2]).astype(jnp.uint8)


def unpacked(packed: jax.Array) -> jax.Array:
    """Return the codes, likewise."""
    tiles = _in_tiles(packed.astype(jnp.bfloat16), COLUMNS)
    weights = np.repeat(np.eye(COLUMNS), 2, axis=1).astype(jnp.bfloat16)
    twice = jnp.matmul(tiles, weights, preferred_element_type=jnp.float32)
    both = _out_of_tiles(twice, packed.shape[-2]).astype(jnp.uint8)
    # Shifted by a number: of a select between two shifts XLA would keep both in memory.
    late = lax.broadcasted_iota(jnp.uint8, both.shape, both.ndim - 1) & np.uint8(1)
    return (both >> (np.uint8(4) * late)) & np.uint8(15)


def _in_tiles(rows: jax.Array, columns: int) -> jax.Array:
    """Return rows in the order of a TPU's memory: (..., rows / 8, columns of tiles, 8, `columns`)."""
    *leading, count, run = rows.shape
    padded = jnp.pad(rows, [(0, 0)] * len(leading) + [(0, -count % ROWS), (0, 0)])
    return padded.reshape(*leading, -1, ROWS, run // columns, columns).swapaxes(-2, -3)


def _out_of_tiles(tiles: jax.Array, count: int) -> jax.Array:
    """Return `count` rows of a result of `_in_tiles`."""
    *leading, high, across, rows, columns = tiles.shape
    return tiles.swapaxes(-2, -3).reshape(*leading, high * rows, across * columns)[..., :count, :]
