"""Means by halves, and powers of the count by roots. Contract: M3, M4. Vectors: adafactor."""

import numpy as np


def mean(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the mean along an axis, which stays with a size of 1, or of all elements, 0-d.

    The second half of the numbers is added to the first until a single number is left. Of an odd number the
    last of the first half has no partner and stays. The sum is multiplied by 1/n, rounded once.

    Args:
        x: float32. The mean of no numbers is 0.
        axis: one, or None.
    """
    rows = x.reshape(1, -1) if axis is None else np.moveaxis(x, axis, -1)
    size = rows.shape[-1]
    while rows.shape[-1] > 1:
        half = (rows.shape[-1] + 1) // 2
        total = rows[..., :half].copy()
        total[..., : rows.shape[-1] - half] += rows[..., half:]
        rows = total
    if size == 0:
        rows = np.zeros((*rows.shape[:-1], 1), np.float32)
    else:
        rows = rows * (np.float32(1) / np.float32(size))
    return rows.reshape(()) if axis is None else np.moveaxis(rows, -1, axis)


def inverse_power(count, c) -> np.float32:
    """Return count^-c: the product of count^(2^-k) over the bits 2^-k of c, and its inverse.

    Each root is that of the one before, correctly rounded, and each product is rounded once. The relative
    error is under 2^-19: of 25 roots, each is off by at most 2^-24, as much as each product.

    Args:
        count: at least 1; becomes float32.
        c: in [0, 1], becomes float32; bits below 2^-24 do not count.
    """
    root, power = np.float32(count), np.float32(1)
    bits = int(np.floor(np.float64(np.float32(c)) * 2.0**24))
    for k in range(25):
        if bits >> (24 - k) & 1:
            power = power * root
        root = np.sqrt(root)
    return np.float32(1) / power
