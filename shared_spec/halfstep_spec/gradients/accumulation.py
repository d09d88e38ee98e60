"""Gradients of micro-batches, added up in 16 bits. Contract: G1. Vectors: accumulation."""

import numpy as np

from halfstep_spec.numbers.rounding import decode, round_to


def accumulate(total: np.ndarray, g: np.ndarray, dtype: str, words: np.ndarray) -> np.ndarray:
    """Return the patterns of stochastic(total + g); the sum is formed in float32.

    Args:
        total: patterns of `dtype`: of -0.0 at the first micro-batch, which adding changes into the gradient.
        g: the gradient, float32.
        dtype: of the sum. Values beyond the largest finite become infinity.
        words: one uint32 per element, of role 3; their step counts the leaf's gradients.
    """
    return round_to(decode(total, dtype) + g, dtype, words)
