"""What a `Format` asks of its codes, of whatever kind.

Contract: F3 to F5. Elementwise; which elements share a scale is not known here (`blocks.py` and `formats.py`
know it).
"""

from typing import Protocol

import torch
from torch import Tensor

NAN_SCALE = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""


class Codes(Protocol):
    """What a `Format` asks of its codes.

    Scales are int32 bytes, of a shape that broadcasts with the values; None in a format without.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the arrays."""
        ...

    @property
    def signed(self) -> bool:
        """Whether they hold negative values."""
        ...

    @property
    def half_gap(self) -> tuple[float, str]:
        """Half the largest relative gap between codes, as a number and in words (contract F3)."""
        ...

    @property
    def packed(self) -> bool:
        """Whether they are of 4 bits, two of them kept in a byte; they are packed by who calls."""
        ...

    @property
    def nan_in_scale(self) -> bool:
        """Whether a NaN marks its block, since there is no code for it."""
        ...

    @property
    def for_second_moments(self) -> bool:
        """Whether small positive numbers are held well enough beside large ones."""
        ...

    @property
    def dithered(self) -> bool:
        """Whether one word serves all elements, and is asked for again by `decode`."""
        ...

    @property
    def scale_range(self) -> tuple[int, int]:
        """The lowest and the highest scale byte; `NAN_SCALE` apart."""
        ...

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the scale of blocks whose largest magnitudes are `block_max`."""
        ...

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Round float32 to the numbers that codes are: float32 or int32, for a cast to `dtype`."""
        ...

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return what `encode` gives, and what it decodes to, in a format without a scale."""
        ...

    def to_wide(self, codes: Tensor) -> Tensor:
        """Undo the cast."""
        ...

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the float32 values: exact; `words` are those with which dithered codes were made."""
        ...


class RoundTrip:
    """Codes whose values are those that they decode to, for want of a shorter way."""

    def round_trip(self: Codes, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return what `encode` gives, and what it decodes to, in a format without a scale."""
        wide = self.encode(x, None, words, nonzero)
        return wide, self.decode(self.to_wide(wide), None)
