"""A first moment in units of the root of the second one. Contract: F12, F13. Vectors: relative.

Adam divides a first moment by the root of the second: in that unit it is bounded, and so needs no scale.
"""

import math

import numpy as np

from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.relative_codes import FINE_CODES, FIXED_CODES

LARGEST_BOUND = 7.5
"""The largest number of codes without a scale."""
_SMALLEST_NORMAL = np.float32(2.0**-126)
# The largest float32 numbers with a finite scale of F14: 12288 times 127, and about 12288 times 7.
_LARGEST = {"int8": np.uint32(0x49BE8000).view(np.float32), "int4": np.uint32(0x47A7FFFF).view(np.float32)}


def relative(
    dtype: str, block_size: int | str | None = None, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of a first moment in units of the root of the second one: z = m / sqrt(v).

    Without a block size there is no scale, and no array is too small; with one, integers have fine scales.
    """
    names = FIXED_CODES if block_size is None else FINE_CODES
    if dtype not in names:
        raise ValueError(
            f"relative: dtype={dtype} with block_size={block_size} is none of {', '.join(names)}."
        )
    if block_size is None:
        return Format(dtype, relative=True)
    return Format(dtype, True, block_size, min_size, min_ndim, "fine", relative=True)


def to_unit(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return z = m / sqrt(v), and 0 where v is 0 or subnormal: rounded twice."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(v < _SMALLEST_NORMAL, np.float32(0), m / np.sqrt(v)).astype(np.float32)


def within_scales(z: np.ndarray, fmt: Format) -> np.ndarray:
    """Return z, where finite, up to the largest number that a fine scale holds: past it a block is NaN."""
    if not fmt.scaled:
        return z
    largest = _LARGEST[fmt.dtype]
    return np.where(np.isfinite(z), np.clip(z, -largest, largest), z)


def from_unit(z: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return m = z sqrt(v): rounded twice."""
    return z * np.sqrt(v)


def bound(b1: float, b2: float) -> float:
    """Return the largest |z| of averages of g and g g, by Cauchy and Schwarz; infinity if there is none."""
    if b1 * b1 >= b2:
        return math.inf
    return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
