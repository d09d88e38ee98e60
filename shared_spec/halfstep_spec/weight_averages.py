"""An average of the weights over steps, kept in their own dtype. Contract: G3. Vectors: averages."""

import numpy as np

from halfstep_spec.numbers.moments import ema
from halfstep_spec.numbers.rounding import decode, round_to


def ema_params(average: np.ndarray, p: np.ndarray, decay, dtype: str, words: np.ndarray) -> np.ndarray:
    """Return the patterns of stochastic((decay average) + ((1 - decay) p)).

    Args:
        average: patterns of `dtype`; at the start the patterns of the weights.
        p: the weights, patterns of `dtype`.
        decay: rate of the average, float32.
        dtype: of both. Values beyond the largest finite become infinity.
        words: one uint32 per element, of the role of a moment named "ema"; their step counts the averages.
    """
    return round_to(ema(decode(average, dtype), decode(p, dtype), decay), dtype, words)
