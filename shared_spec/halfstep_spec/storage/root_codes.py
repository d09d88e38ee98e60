"""Codes on a straight line in the eighth root, for second moments.

Contract: F16. Vectors: formats.
"""

import dataclasses

import numpy as np

from halfstep_spec.storage.base_codes import Codes

_ABOVE = 6
_TOP = 255 + _ABOVE
# (256/261)^8, so that the largest code stands for the power of two of its block.
_UNIT = np.float32((256 / _TOP) ** 8)
# Far below the smallest number, which is 2^-43.6.
_LEAST = np.float32(2.0**-46)
_ONE = 1 << 17


@dataclasses.dataclass(frozen=True)
class RootCodes(Codes):
    """Eighth powers of evenly spaced numbers: ((c + 6) / 261)^8 times the power of two of their block."""

    signed = False

    @property
    def carry(self) -> int:
        """The largest code is 1."""
        return 0x7FFFFF

    @property
    def half_gap(self) -> float:
        """That of the widest gap of which both numbers are at least 1/10, as of a table."""
        numbers = (np.arange(_ABOVE, _TOP + 1) / _TOP) ** 8
        numbers = numbers[numbers >= 0.1]
        return float((np.diff(numbers) / numbers[1:]).max() / 2)

    @property
    def scale_range(self) -> tuple[int, int]:
        """Half of the smallest number is normal, and so is the inverse of the largest scale."""
        return 46, 253

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return codes of the root, rounded; there is no zero."""
        assert scale is not None
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            y = np.where(np.isfinite(x), x, np.float32(0)) * np.ldexp(np.float32(1), 127 - scale.astype(int))
            root, inverse = eighth_root(np.maximum(y, _LEAST))
        place = (root * np.float32(_TOP * _ONE)).astype(np.int64) - _ABOVE * _ONE
        drawn = _ONE // 2 if words is None else _drawn(words, inverse)
        return np.clip(place + drawn >> 17, 0, 255).astype(np.uint8)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers of the codes: three squares and a product."""
        assert scale is not None
        x = (codes.astype(np.float32) + np.float32(_ABOVE)) / np.float32(256)
        for _ in range(3):
            x = x * x
        return x * (_UNIT * np.ldexp(np.float32(1), scale.astype(int) - 127))


def _drawn(words: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Return the number added to a place before it is cut, so that the mean of the root's square is kept.

    Of a uniform d it is d - d (1 - d) / (2 R), R = 261 root.
    """
    # The root of a number that a code stands for is up to two units of 2^-17 off: it may not move.
    k = np.clip(words.astype(np.int64) >> 16, 1, 65534)
    less = (k * (65535 - k)).astype(np.float32) * (inverse * np.float32(2.0**-15 / (2 * _TOP)))
    return 2 * k + 1 - less.astype(np.int64)


def eighth_root(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y^(1/8) to within 2.1 x 2^-24 of it, and about y^(-1/8): by products, sums and a shift.

    Two of Newton's steps to y^(-1/8), the first with a constant that halves its error; then the root
    from that, and a correction by its own eighth power.

    Args:
        y: float32, from 2^-46 to 4.
    """
    x = (np.uint32(0x47690000) - (y.view(np.uint32) >> np.uint32(3))).view(np.float32)
    for c in (1.126953125, 1.125):
        x = x * (np.float32(c) - ((np.float32(0.125) * y) * _fourth(x)) * _fourth(x))
    root = y * (_fourth(x) * ((x * x) * x))
    return root + root * (np.float32(0.875) * (np.float32(1) - root * x)), x


def _fourth(x: np.ndarray) -> np.ndarray:
    return (x * x) * (x * x)
