"""Weight decay. Contract: section D. Vectors: adam, no_contraction."""

import numpy as np


def add_decayed_weights(u: np.ndarray, p: np.ndarray, weight_decay, *, absolute: bool = False) -> np.ndarray:
    """Return u + (weight_decay p), or with `absolute` u - (weight_decay p); each operation rounds once.

    Args:
        u: float32 update.
        p: float32 values of the weights.
        weight_decay: becomes float32.
        absolute: the decay is not to be scaled by the learning rate: the link then stands after
            `scale_by_learning_rate`.
    """
    decay = np.float32(weight_decay) * p
    return u - decay if absolute else u + decay
