"""Clipping by the norm of all updates. Contract: N3. Vectors: clip."""

import numpy as np


def clip(u: np.ndarray, norm: np.float32, max_norm: float) -> np.ndarray:
    """Return the update, times max_norm / norm if the norm is larger than that, or NaN.

    Args:
        u: the update of one leaf, of any dtype that float32 holds.
        norm: of all updates.
        max_norm: float32.
    """
    u, bound = np.asarray(u, np.float32), np.float32(max_norm)
    return u if norm <= bound else (bound / norm) * u
