"""The norm of many arrays at once, in float32 or exactly. Contract: N1, N2. Vectors: clip."""

from collections.abc import Sequence

import numpy as np

from halfstep_spec.numbers.norms import norm

_INFINITY = 0x7F800000


@np.errstate(over="ignore")
def global_norm(arrays: Sequence[np.ndarray], *, exact: bool = False) -> np.float32:
    """Return the Euclidean norm of all elements of all arrays, in float32.

    With `exact` integers are added (contract N2): the same bits in any order. Else as `norm`, of all arrays
    end to end. It is infinite where no float32 number is as large.
    """
    x = np.concatenate([np.zeros(0, np.float32), *(np.asarray(a, np.float32).reshape(-1) for a in arrays)])
    return _exact_norm(x) if exact else norm(x)


def norm_in_range(x: np.ndarray, *, exact: bool = False) -> tuple[np.float32, np.float32]:
    """Return the norm of s x, and s: 1; 2^-64 where x is finite and its norm above 2^100."""
    norm = global_norm([x], exact=exact)
    if not norm > np.float32(2.0**100) or not np.isfinite(x).all():
        return norm, np.float32(1)
    scale = np.float32(2.0**-64)
    return global_norm([x * scale], exact=exact), scale


def _exact_norm(x: np.ndarray) -> np.float32:
    bits = x.view(np.uint32) & 0x7FFFFFFF
    largest = int(bits.max(initial=0))
    if largest >= _INFINITY:
        return np.float32(np.inf if largest == _INFINITY else np.nan)
    if largest < 1 << 23:
        return np.float32(0)
    # In units of 2^(e - 23), e the exponent of the largest.
    total = sum(int(r) ** 2 for r in _integers(bits, largest >> 23))
    cut = max(total.bit_length() - 32, 0)
    square = np.float32(total >> cut) * np.float32(2.0**cut)
    return np.sqrt(square) * np.float32(2.0**-23) * np.float32(2.0 ** ((largest >> 23) - 127))


def _integers(bits: np.ndarray, field: int) -> np.ndarray:
    """Return |x| in units of the last place of the largest, to nearest, halves up; subnormals are 0."""
    mantissa = np.where(bits >> 23 > 0, (bits & 0x7FFFFF) | 0x800000, 0).astype(np.uint64)
    shift = np.minimum(field - (bits >> 23), 25).astype(np.uint64)
    return (mantissa + ((np.uint64(1) << shift) >> np.uint64(1))) >> shift
