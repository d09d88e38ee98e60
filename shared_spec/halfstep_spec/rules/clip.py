"""Clipping by the norm of all updates. Contract: N3. Vectors: clip."""

import numpy as np


def clip(u: np.ndarray, norm: np.float32, max_norm: float) -> np.ndarray:
    """Return the update, times max_norm / norm if the norm is larger than that, or NaN."""
    u, bound = np.asarray(u, np.float32), np.float32(max_norm)
    return u if norm <= bound else (bound / norm) * u
