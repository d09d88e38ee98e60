"""How an array is cut into blocks that share a scale: shapes alone.

Contract: F4, F11. A block never leaves the trailing axes that it runs along. So an array that is sharded
along leading axes keeps each block whole on one device.
"""

import math

BlockSize = int | str | None
"""A number of elements, "row" (one block per last-axis row) or None (one block in all)."""


def block_layout(shape: tuple[int, ...], block_size: BlockSize) -> tuple[tuple[int, ...], int, int]:
    """Return (leading shape, length of a run, block size) of an array.

    A run is the shortest run of trailing axes with a product of at least `block_size`, or all axes if none
    has. Blocks stand along it, and the last block of a run may be short.

    Example:
        >>> block_layout((64, 32, 3, 3), 128)
        ((64,), 288, 128)
    """
    shape = tuple(shape)
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


def packed_shape(shape: tuple[int, ...], block_size: BlockSize) -> tuple[int, ...]:
    """Return the shape of 4-bit codes, two to a byte: the leading shape, and the bytes of a run.

    Example:
        >>> packed_shape((64, 32, 3, 3), 128), packed_shape((5, 7), "row")
        ((64, 144), (5, 4))
    """
    leading, run, _ = block_layout(shape, block_size)
    return (*leading, -(-run // 2))
