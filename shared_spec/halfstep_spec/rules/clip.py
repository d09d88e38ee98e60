"""Clipping by the norm of all updates. Contract: N3. Vectors: clip."""

import numpy as np

from halfstep_spec.numbers.global_norm import global_norm, norm_in_range


def clip(u: np.ndarray, norm: np.float32, max_norm: float) -> np.ndarray:
    """Return the update, times max_norm / norm if the norm is larger than that, or NaN."""
    u, bound = np.asarray(u, np.float32), np.float32(max_norm)
    return u if norm <= bound else (bound / norm) * u


def clip_by_global_norm(u: np.ndarray, max_norm: float, *, exact: bool = False) -> np.ndarray:
    """Return updates clipped by their own norm, which may be above float32's largest number."""
    u, bound = np.asarray(u, np.float32), np.float32(max_norm)
    if global_norm([u], exact=exact) <= bound:
        return u
    norm, scale = norm_in_range(u, exact=exact)
    return (bound / norm) * (scale * u)
