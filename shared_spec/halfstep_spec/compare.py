"""The only comparisons in the repository: bits, ulps, and the norm of the difference."""

import numpy as np

from halfstep_spec.vectors import Array, is_nan


def assert_same(actual: Array, expected: Array, context: str = "") -> None:
    """Compare as `expected.compare` says; in a failure, name the first element that differs."""
    assert (actual.dtype, actual.bits.shape) == (expected.dtype, expected.bits.shape), (
        f"{context}: got {actual.dtype}{actual.bits.shape}, expected {expected.dtype}{expected.bits.shape}"
    )
    rule = expected.compare or "bits"
    if isinstance(rule, dict) and "norm" in rule:
        distance = relative_distance(actual, expected)
        assert distance <= rule["norm"], (
            f"{context}: the norm of the difference is {distance:.3g} of the norm"
        )
        return
    wrong = differing(actual, expected) if rule == "bits" else ~within_ulps(actual, expected, rule["ulps"])
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{context}: {int(wrong.sum())} of {wrong.size} elements differ; the first at {first}: "
            f"got {int(actual.bits[first]):x}, expected {int(expected.bits[first]):x} ({expected.dtype})"
        )


def differing(actual: Array, expected: Array) -> np.ndarray:
    """Tell which elements have other bits; NaN is one class."""
    nan, also_nan = is_nan(actual.bits, actual.dtype), is_nan(expected.bits, expected.dtype)
    return np.where(nan | also_nan, nan != also_nan, actual.bits != expected.bits)


def within_ulps(actual: Array, expected: Array, ulps: int) -> np.ndarray:
    """Tell which elements are at most `ulps` representable values apart; NaN only from NaN."""
    nan, also_nan = is_nan(actual.bits, actual.dtype), is_nan(expected.bits, expected.dtype)
    near = np.abs(_rank(actual) - _rank(expected)) <= ulps
    return np.where(nan | also_nan, nan & also_nan, near)


def relative_distance(actual: Array, expected: Array) -> float:
    """Return the Frobenius norm of the difference over that of `expected`; infinity for NaN."""
    x, y = (array.bits.view(np.float32).astype(np.float64) for array in (actual, expected))
    distance = np.linalg.norm(x - y) / np.linalg.norm(y)
    return float(distance) if np.isfinite(distance) else np.inf


def _rank(array: Array) -> np.ndarray:
    """Number the values of a format in their order, so that neighbours are one apart and both zeros are 0."""
    width = array.bits.dtype.itemsize * 8
    bits = array.bits.astype(np.int64)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return np.where(bits >> (width - 1) == 1, -magnitude, magnitude)
