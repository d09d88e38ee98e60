"""The interface of codes that a `Format` uses.

Contract: F3 to F5. Codes are elementwise. `blocks.py` and `formats.py` decide which elements share a scale.
"""

import torch
from torch import Tensor

from halfstep.storage import base_codes as shared
from halfstep.storage.base_codes import NAN_SCALE
from halfstep_torch.numbers.arrays import XP

__all__ = ["NAN_SCALE", "Codes"]


class Codes:
    """Codes of tensors, by the arithmetic of `halfstep` where a subclass has none.

    Scales are int32 bytes in a shape that broadcasts with the values, or None in a format without scales.
    """

    def __init__(self, codes: shared.Codes):
        self.shared = codes
        self.dtype, self.numbers, self.exponent = codes.dtype, codes.numbers, codes.exponent

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the scale of blocks with the largest magnitudes `block_max`."""
        return self.shared.scale(XP, block_max)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Round float32 to codes as float32 or int32 numbers, which are then cast to their dtype."""
        return self.shared.encode(XP, x, scale, words, nonzero)

    def round_trip(self, x: Tensor, words: Tensor | None, nonzero: bool) -> tuple[Tensor, Tensor]:
        """Return the codes of `encode`, and their values, in a format without a scale."""
        wide = self.encode(x, None, words, nonzero)
        return wide, self.decode(self.to_wide(wide), None)

    def with_inverse_root(self, x: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the codes of `encode`, and about 1/sqrt(x), in a format with inverse roots."""
        return self.shared.with_inverse_root(XP, x, words)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Undo the cast."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the exact float32 values. Dithered codes need the `words` of their encoding."""
        return self.shared.decode(XP, wide, scale, words)
