"""The learning rate. Contract: section D. Vectors: adam, no_contraction."""

import numpy as np


def scale_by_learning_rate(u: np.ndarray, learning_rate, *, flip_sign: bool = True) -> np.ndarray:
    """Return (-learning_rate) u, or learning_rate u without `flip_sign`; rounded once.

    Args:
        u: float32 update.
        learning_rate: becomes float32; a schedule has been read already, at the count before its increment.
        flip_sign: True to descend.
    """
    rate = np.float32(learning_rate)
    return (-rate if flip_sign else rate) * u
