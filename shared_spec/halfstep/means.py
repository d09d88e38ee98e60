"""Means with the same bits in each framework, device and mesh, from sums by halves (contract M3).

Only slices and sums are used, so that the function works in every framework.
"""

from collections.abc import Callable

import numpy as np

from halfstep.arrays import Array


def mean(x: Array, axis: int | None, concatenate: Callable) -> Array:
    """Return the mean along an axis, kept with size 1, or the mean over all elements as a 0-d array.

    With h = ceil(n / 2), numbers h, h + 1, ... are added to numbers 0, 1, ..., element by element. If n is
    odd, the middle number is not changed. This is repeated ceil(log2 n) times, and the last number is
    multiplied by float32(1/n).

    Args:
        x: a float32 array. If it is empty, the mean is 0.
        axis: an axis from 0 up, or None for all elements.
        concatenate: the framework's function.
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
