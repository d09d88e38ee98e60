"""Means with the same bits in each framework, device and mesh: sums by halves (contract M3).

Slices and sums alone, so that arrays of every framework can be given.
"""

from collections.abc import Callable

import numpy as np

from halfstep.arrays import Array


def mean(x: Array, axis: int | None, concatenate: Callable) -> Array:
    """Return the mean along an axis, which stays with a size of 1; of all elements, 0-d, without one.

    With h = ceil(n / 2), the second half of n numbers is added to the first, element by element; of an odd
    number the middle one waits. The rest after ceil(log2 n) times is multiplied by float32(1/n).

    Args:
        x: float32. The mean of no numbers is 0.
        axis: from 0 up, or None.
        concatenate: the framework's.
    """
    flat = x.reshape(-1) if axis is None else x
    along = axis or 0
    size = n = flat.shape[along]
    while n > 1:
        half = n - n // 2
        added = flat[_part(along, 0, n - half)] + flat[_part(along, half, n)]
        waiting = flat[_part(along, n - half, half)]
        flat, n = added if n == 2 * half else concatenate([added, waiting], along), half
    if size == 0:
        flat = flat.sum(along).reshape((*flat.shape[:along], 1, *flat.shape[along + 1 :]))
    elif size > 1:
        flat = flat * float(np.float32(1) / np.float32(size))
    return flat.reshape(()) if axis is None else flat


def _part(axis: int, start: int, stop: int) -> tuple:
    return (*[slice(None)] * axis, slice(start, stop))
