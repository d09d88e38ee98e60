"""How an array is cut into blocks that share a scale.

Contract: F4, F11. A block never leaves the trailing axes that it runs along. So an array that is sharded
along leading axes keeps each block whole on one device.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.storage.blocks import BlockSize, block_layout
from halfstep_jax.storage import tiles
from halfstep_jax.xla.kept_on_cpu import keep_codes_for_kernels
from halfstep_jax.xla.shards import Shard


def check_blocks(caller: str, name: str, shard: Shard | None, block_size: BlockSize) -> None:
    """Refuse a cut through blocks that share a scale."""
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
    """Return the largest magnitude of every block; a NaN or an infinity counts as `not_finite`.

    Example:
        >>> block_maximum(jnp.array([1.0, -4.0, jnp.nan, 2.0, 3.0]), 2).tolist()
        [4.0, 2.0, 3.0]
    """
    rows, block = _magnitudes(x, block_size, not_finite)
    one_axis = x.shape == rows.shape
    return lax.platform_dependent(
        rows,
        cpu=lambda rows: _maximum_by_halves(_cut(rows, block)),
        tpu=lambda rows: _of_maximum_on_tpu(lambda largest: largest, rows, block, one_axis),
        default=lambda rows: _maximum(rows, block),
    )


def of_block_maximum(
    scale: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    block_size: BlockSize,
    not_finite: float = 0.0,
    *,
    bytes_on_tpu: bool = True,
) -> jax.Array:
    """Return `scale`, a byte, of the largest magnitude of every block.

    Infinities and NaN count as `not_finite`. `scale` does not fall. So it may be applied to every number
    before the maximum is taken, and is where an array must be kept in between: bytes take a quarter of the
    room. `bytes_on_tpu` says whether on a TPU too.
    """
    rows, block = _magnitudes(x, block_size, not_finite)
    one_axis = x.shape == rows.shape
    early, late = (scale, lambda largest: largest) if bytes_on_tpu else (lambda largest: largest, scale)
    return lax.platform_dependent(
        rows,
        cpu=lambda rows: _of_maximum_by_halves(scale, rows, block),
        tpu=lambda rows: late(_of_maximum_on_tpu(early, rows, block, one_axis)),
        default=lambda rows: scale(_maximum(rows, block)),
    )


def _magnitudes(x: jax.Array, block_size: BlockSize, not_finite: float) -> tuple[jax.Array, int]:
    """Return the magnitudes of `x` in runs, and how many of them are a block."""
    leading, run, block = block_layout(x.shape, block_size)
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < np.float32(np.inf), magnitude, np.float32(not_finite))
    return magnitude.reshape(*leading, run), block


def per_element(scales: jax.Array, shape: tuple[int, ...], block_size: BlockSize) -> jax.Array:
    """Return the scale of every element, in the array's shape.

    Example:
        >>> per_element(jnp.array([[1], [2]]), (2, 3), "row").tolist()
        [[1, 1, 1], [2, 2, 2]]
    """
    leading, run, block = block_layout(shape, block_size)
    repeated = lax.platform_dependent(
        scales,
        tpu=functools.partial(
            _repeated_on_tpu, rows=(*leading, run), block=block, one_axis=shape[-1:] == (run,)
        ),
        default=lambda scales: _repeated(scales, block)[..., :run],
    )
    return repeated.reshape(shape)


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
    return lax.platform_dependent(runs, cpu=_packed_on_cpu, tpu=_packed_on_tpu, default=_packed)


def unpack(
    packed: jax.Array, shape: tuple[int, ...], block_size: BlockSize, codes: jax.Array | None = None
) -> jax.Array:
    """Return the codes of every element of an array of `shape`, packed two to a byte.

    On a TPU, where unpacking takes three passes, `codes` is returned where the result is known.

    Example:
        >>> unpack(jnp.array([[33, 3], [84, 6]], jnp.uint8), (2, 3), "row").tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    _, run, _ = block_layout(shape, block_size)

    def of_packed(packed: jax.Array, *_) -> jax.Array:
        return _unpacked(packed)[..., :run].reshape(shape)

    if codes is not None:
        return lax.platform_dependent(packed, codes, tpu=lambda _, codes: codes, default=of_packed)
    runs = lax.platform_dependent(packed, tpu=_unpacked_on_tpu, default=_unpacked)
    return runs[..., :run].reshape(shape)


def kept_for_kernels(codes: jax.Array) -> jax.Array:
    """Return unpacked codes, which a CPU keeps as bytes between kernels.

    There XLA takes elements one at a time wherever it packs or unpacks, with all that is in the same kernel.
    """
    return lax.platform_dependent(codes, cpu=keep_codes_for_kernels, default=lambda codes: codes)


def _packed(runs: jax.Array) -> jax.Array:
    """Return 4-bit codes of runs of even length, two to a byte."""
    pairs = runs.reshape(*runs.shape[:-1], runs.shape[-1] // 2, 2).astype(jnp.uint4)
    # Not by a shift of every second code: XLA then takes elements one at a time, and five times as long.
    return lax.bitcast_convert_type(pairs, jnp.uint8)


def _packed_on_cpu(runs: jax.Array) -> jax.Array:
    packed = _packed(runs)
    # A select: XLA on CPU keeps its result, and would make the codes again where they are decoded.
    return jnp.where(packed == 0, np.uint8(0), packed)


def _unpacked(packed: jax.Array) -> jax.Array:
    pairs = lax.bitcast_convert_type(packed, jnp.uint4).astype(jnp.uint8)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _packed_on_tpu(runs: jax.Array) -> jax.Array:
    return tiles.packed(runs) if tiles.has_columns(runs.shape, 2) else _packed(runs)


def _unpacked_on_tpu(packed: jax.Array) -> jax.Array:
    return tiles.unpacked(packed) if tiles.has_columns(packed.shape) else _unpacked(packed)


def _maximum(rows: jax.Array, block: int) -> jax.Array:
    """Return the maximum of every block. Of floats: of integers, XLA on CPU does not vectorise it."""
    return jnp.max(_cut(rows, block), axis=-1, initial=0)


def _of_maximum_by_halves(scale: Callable, rows: jax.Array, block: int) -> jax.Array:
    """Return `scale` of the maximum of every block, a byte: of the bytes of halves, which are kept.

    XLA leaves the maximum of bytes to a library, in front of which a kernel ends. Of float32 it would compute
    the rows for each half of the halves, these an element at a time.
    """
    blocks = _cut(rows, block)
    if not _has_halves(blocks):
        return scale(_maximum_by_halves(blocks))
    return jnp.max(scale(_halved(blocks)), axis=-1, initial=0)


def _maximum_by_halves(blocks: jax.Array) -> jax.Array:
    """Return the maximum of every block. Its inputs are fused with a halving, not with a reduction."""
    return jnp.max(_by_halves(blocks), axis=-1, initial=0)


def _by_halves(blocks: jax.Array) -> jax.Array:
    """Return the last few maxima of every block, by halving it."""
    while _has_halves(blocks):
        blocks = _halved(blocks)
    return blocks


def _has_halves(blocks: jax.Array) -> bool:
    return blocks.shape[-1] % 2 == 0 and blocks.shape[-1] > 16


def _halved(blocks: jax.Array) -> jax.Array:
    width = blocks.shape[-1] // 2
    return jnp.maximum(blocks[..., :width], blocks[..., width:])


def _of_maximum_on_tpu(scale: Callable, rows: jax.Array, block: int, one_axis: bool) -> jax.Array:
    """Return `scale` of the maximum of every block, in an order in which XLA on TPU need not move the array.

    `one_axis` tells whether `rows` are the rows of the array itself.
    """
    # Of bytes XLA takes the maxima of two arrays in one pass, and it keeps padded arrays in memory.
    of_elements = scale(rows)
    if not tiles.cut_by_blocks(rows.shape, block):
        return _maximum(of_elements, block)
    if not (one_axis and tiles.on_end(rows.shape)):
        return tiles.maximum(of_elements, block)
    if rows.shape[-1] % tiles.ROWS:
        return _maximum(of_elements, block)
    return _maximum(_maximum(of_elements, tiles.ROWS), block // tiles.ROWS)


def _repeated(scales: jax.Array, block: int) -> jax.Array:
    """Return every scale `block` times along the last axis."""
    repeated = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return repeated.reshape(*scales.shape[:-1], scales.shape[-1] * block)


def _repeated_on_tpu(scales: jax.Array, rows: tuple[int, ...], block: int, one_axis: bool) -> jax.Array:
    """Return the scale of every element of rows, in such an order."""
    run = rows[-1]
    if not tiles.cut_by_blocks(rows, block):
        return _repeated(scales, block)[..., :run]
    if not (one_axis and tiles.on_end(rows)):
        return tiles.repeated(scales, block)[..., :run]
    unit = math.gcd(run, block)
    return _repeated(_repeated(scales, block // unit)[..., : run // unit], unit)


def _cut(rows: jax.Array, block: int) -> jax.Array:
    """Return rows as blocks."""
    *leading, run = rows.shape
    if block and run % block:
        # Only the input of the maximum is padded: a padded moment would be a copy of it.
        rows = jnp.pad(rows, [(0, 0)] * len(leading) + [(0, -run % block)])
    return rows.reshape(*leading, -(-run // block) if block else 0, block)
