"""How an array is cut into blocks that share a scale. Contract: F4, F11. Vectors: formats, codebook."""

import math

import numpy as np


def block_layout(shape: tuple[int, ...], block_size: int | str | None) -> tuple[tuple[int, ...], int, int]:
    """Return (leading shape, length of the run, block size) of an array.

    A run is the fewest trailing axes with a product of at least `block_size`, or all axes if none has. Blocks
    stand along it, and the last block of a run may be short. "row" is one block per last-axis row, None a
    single block.
    """
    if block_size is None:
        return (), math.prod(shape), math.prod(shape)
    if block_size == "row":
        return shape[:-1], shape[-1] if shape else 1, shape[-1] if shape else 1
    assert isinstance(block_size, int)
    axes = 0
    while axes < len(shape) and math.prod(shape[len(shape) - axes :]) < block_size:
        axes += 1
    axes = max(axes, min(1, len(shape)))
    return shape[: len(shape) - axes], math.prod(shape[len(shape) - axes :]), block_size


def scale_shape(shape: tuple[int, ...], block_size: int | str | None) -> tuple[int, ...]:
    """Return the shape of the scales: the leading shape, and the number of blocks of a run."""
    leading, run, block = block_layout(shape, block_size)
    return (*leading, -(-run // block) if block else 0)


def block_maximum(x: np.ndarray, block_size: int | str | None) -> np.ndarray:
    """Return the largest magnitude of every block, NaN and infinities aside; 0 where nothing else is left."""
    leading, run, block = block_layout(x.shape, block_size)
    magnitude = np.where(np.isfinite(x), np.abs(x), np.float32(0)).reshape(*leading, run)
    short = -run % block if block else 0
    padded = np.concatenate([magnitude, np.zeros((*leading, short), np.float32)], axis=-1)
    return padded.reshape(*scale_shape(x.shape, block_size), max(block, 1)).max(axis=-1)


def per_element(scales: np.ndarray, shape: tuple[int, ...], block_size: int | str | None) -> np.ndarray:
    """Return the scale of every element, in the array's shape."""
    _, run, block = block_layout(shape, block_size)
    return np.repeat(scales, max(block, 1), axis=-1)[..., :run].reshape(shape)


def pack(codes: np.ndarray, block_size: int | str | None) -> np.ndarray:
    """Return 4-bit codes packed two per byte, the earlier one in the low half; a run ends with its byte."""
    leading, run, _ = block_layout(codes.shape, block_size)
    runs = np.concatenate([codes.reshape(*leading, run), np.zeros((*leading, run % 2), np.uint8)], axis=-1)
    return (runs[..., 0::2] | (runs[..., 1::2] << 4)).astype(np.uint8)


def unpack(packed: np.ndarray, shape: tuple[int, ...], block_size: int | str | None) -> np.ndarray:
    """Return the codes of every element, in the array's shape."""
    leading, run, _ = block_layout(shape, block_size)
    return (
        np.stack([packed & 15, packed >> 4], axis=-1)
        .reshape(*leading, run + run % 2)[..., :run]
        .reshape(shape)
    )
