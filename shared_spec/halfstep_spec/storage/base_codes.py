"""The interface of codes, of any kind, that a `Format` uses.

Contract: F3 to F5. Elementwise: which elements share a scale is decided in `formats.py`.
"""

import numpy as np

NAN_SCALE = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""


class Codes:
    """The interface of codes that a `Format` uses.

    Attributes:
        dtype: the label of the codes in golden vectors.
        signed: whether negative values can be stored.
        packed: whether they are of 4 bits, two of them kept in a byte; `Format` packs them.
        nan_in_scale: whether a NaN marks its block, since there is no code for it.
        for_second_moments: whether they hold small positive numbers beside large ones well enough.
        dithered: whether one word serves a block, and is asked for again by `decode`.
        half_gap: half the largest relative gap between neighbours, subnormal numbers aside (contract F3).
        carry: added to the pattern of a block's maximum: past the largest code it reaches the next exponent.
        scale_range: the lowest and the highest scale byte: no decoded value is subnormal in float32.
    """

    dtype: str = "uint8"
    signed: bool = True
    packed: bool = False
    nan_in_scale: bool = True
    for_second_moments: bool = True
    dithered: bool = False

    @property
    def half_gap(self) -> float:
        """See above."""
        raise NotImplementedError

    @property
    def carry(self) -> int:
        """See above."""
        raise NotImplementedError

    @property
    def scale_range(self) -> tuple[int, int]:
        """See above."""
        raise NotImplementedError

    def scale(self, block_max: np.ndarray) -> np.ndarray:
        """Return the scale bytes, uint8, of blocks with the largest magnitudes `block_max`."""
        bits = block_max.view(np.uint32).astype(np.int64)
        return np.clip(bits + self.carry >> 23, *self.scale_range).astype(np.uint8)

    def encode(
        self, x: np.ndarray, scale: np.ndarray | None, words: np.ndarray | None, nonzero: np.ndarray
    ) -> np.ndarray:
        """Round float32 to codes, by uint32 words or to nearest.

        `scale` has the byte of every element; None in a format without. Numbers marked `nonzero` are not
        stored as zero.
        """
        raise NotImplementedError

    def decode(
        self, codes: np.ndarray, scale: np.ndarray | None, words: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the float32 values: exact. `words` made the codes, if these are dithered."""
        raise NotImplementedError
