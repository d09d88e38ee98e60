"""Codes of the numbers of a table.

Contract: F8 to F11.
"""

import torch
from torch import Tensor

from halfstep_torch.numbers.arrays import XP
from halfstep_torch.storage.base_codes import Codes
from halfstep_torch.storage.tables import decode_table, encode_table


class TableCodes(Codes):
    """Numbers of a table."""

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the codes of x over its block's scale."""
        assert scale is not None
        codes = encode_table(x * ((254 - scale) << 23).view(torch.float32), words, self.numbers)
        if nonzero is not False and self.numbers.has_zero:
            codes = torch.where((x > 0) & (codes == 0) & nonzero, 1, codes)
        return self.shared.marked(XP, x, scale, codes)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers times their block's scale."""
        assert scale is not None
        return decode_table(wide, self.numbers) * XP.unit(scale)
