"""Norms of whole arrays. Contract: L1. Vectors: lamb."""

import numpy as np


def norm(x: np.ndarray) -> np.float32:
    """Return the Euclidean norm of an array in float32: n = 2^e sqrt(sum((x 2^-e)^2)).

    e is the exponent of max |x|, kept within [-126, 126], so that both powers of two are normal numbers and
    the products with them exact. The sum is of halves, and of halves of halves: one order among others, which
    backends need not share.

    Args:
        x: of any shape and any dtype that float32 holds. An empty array has norm 0.
    """
    x = np.asarray(x, np.float32).reshape(-1)
    if not x.size:
        return np.float32(0)
    field = np.clip(np.abs(x).max().view(np.uint32) >> np.uint32(23), 1, 253)
    down, up = (np.uint32(f << 23).view(np.float32) for f in (254 - field, field))
    return up * np.sqrt(_sum((x * down) ** 2))


def _sum(x: np.ndarray) -> np.float32:
    """Add halves until one number is left: the same bits on every machine."""
    while x.size > 1:
        half = (x.size + 1) // 2
        padded = np.zeros(2 * half, np.float32)
        padded[: x.size] = x
        x = padded[:half] + padded[half:]
    return x[0]
