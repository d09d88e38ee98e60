"""A norm over many arrays whose bits do not depend on the order of the sum. Contract: C2. Vectors: clipping.

Magnitudes become integers, squares of integers are added as integers, and the only roundings are in one
formula at the end.
"""

from collections.abc import Sequence

import numpy as np

_DIGITS, _RADIX = 6, 2**16
# Exponent fields for which 2^(150 - e) and 2^(e - 150) are normal numbers.
_LOWEST, _HIGHEST = 24, 254


def exact_norm(arrays: Sequence[np.ndarray]) -> np.float32:
    """Return the Euclidean norm of all elements of `arrays`: 2^(e - 150) sqrt(sum(r^2)).

    e is the exponent field of max |x|, at least 24, and r = nearest(|x| 2^(150 - e)), an integer below 2^24.
    The sum is exact. It becomes float32 by its digits to the base 2^16, from the highest of six down:
    s = (65536 s) + digit.

    Args:
        arrays: of any shape and any dtype that float32 holds. NaN if an element is NaN, else infinity if one
            is infinite, else 0 if there is nothing but zeros.
    """
    flat = [np.abs(np.asarray(x, np.float32)).reshape(-1) for x in arrays]
    largest = max((x.max() for x in flat if x.size), default=np.float32(0), key=_nan_last)
    if not np.isfinite(largest):
        return largest
    field = int(np.clip(largest.view(np.uint32) >> np.uint32(23), _LOWEST, _HIGHEST))
    total = sum(int(r) ** 2 for x in flat for r in np.rint(x * _power_of_two(277 - field)).tolist())
    s = np.float32(0)
    for i in reversed(range(_DIGITS)):
        s = np.float32(_RADIX) * s + np.float32(total // _RADIX**i % _RADIX)
    with np.errstate(over="ignore"):
        return _power_of_two(field - 23) * np.sqrt(s)


def _nan_last(x: np.float32) -> float:
    return np.inf if np.isnan(x) else float(x) if np.isfinite(x) else float(np.finfo(np.float32).max) * 2


def _power_of_two(field: int) -> np.float32:
    return np.uint32(field << 23).view(np.float32)
