"""What a `Format` asks of its codes, of whatever kind, and what kinds have in common.

Contract: F3 to F5. Elementwise; which elements share a scale is not known here (`blocks.py` and `formats.py`
know it).
"""

import torch
from torch import Tensor

from halfstep.storage import codes as shared
from halfstep.storage.codes import NAN_SCALE

__all__ = ["NAN_SCALE", "Codes"]


class Codes(shared.Codes):
    """Codes, and their arithmetic.

    Scales are int32 bytes, of a shape that broadcasts with the values; None in a format without.
    """

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the scale of blocks whose largest magnitudes are `block_max`.

        That is the exponent field of the smallest power of two under which they fit.
        """
        bits = block_max.view(torch.int32)
        field = (bits + self.carry if self.carry else bits) >> 23
        return (field + self.step if self.step else field).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Round float32 to the numbers that codes are: float32 or int32, for a cast to their dtype."""
        raise NotImplementedError

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return what `encode` gives, and what it decodes to, in a format without a scale."""
        wide = self.encode(x, None, words, nonzero)
        return wide, self.decode(self.to_wide(wide), None)

    def with_inverse_root(self, x: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `encode` gives, and about 1/sqrt(x); where the format has inverse roots."""
        raise NotImplementedError

    def to_wide(self, codes: Tensor) -> Tensor:
        """Undo the cast."""
        return codes.to(torch.float32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the float32 values: exact; `words` are those with which dithered codes were made."""
        raise NotImplementedError
