"""Codes of the numbers of a table.

Contract: F8 to F11.
"""

import dataclasses
import math

import torch
from torch import Tensor

from halfstep_torch.storage.base_codes import NAN_SCALE, RoundTrip
from halfstep_torch.storage.tables import Table, decode_table, encode_table


@dataclasses.dataclass(frozen=True)
class TableCodes(RoundTrip):
    """Numbers of a table.

    Attributes:
        table: of the codes.
    """

    table: Table
    dtype = torch.uint8
    nan_in_scale = True
    dithered = False

    @property
    def for_second_moments(self) -> bool:
        """A sign that is always the same costs half of the numbers, and the small ones."""
        return not self.table.signed

    @property
    def signed(self) -> bool:
        """As the table."""
        return self.table.signed

    @property
    def packed(self) -> bool:
        """As the table."""
        return self.table.packed

    @property
    def half_gap(self) -> tuple[float, str]:
        """The largest in the top decade."""
        exponent = -math.log2(self.table.half_gap)
        words = f"2^-{exponent:.0f}" if exponent.is_integer() else f"1/{1 / self.table.half_gap:.4g}"
        return self.table.half_gap, words

    @property
    def scale_range(self) -> tuple[int, int]:
        """Half of the smallest number, and the inverse of the largest scale, are normal in float32."""
        return self.table.lowest, 253

    def scale(self, block_max: Tensor) -> Tensor:
        """Return the exponent field of the smallest power of two under which `block_max` fits the table."""
        carry, step = self.table.past
        return ((block_max.view(torch.int32) + carry >> 23) + step).clamp(*self.scale_range)

    def encode(self, x: Tensor, scale: Tensor | None, words: Tensor | None, nonzero: bool | Tensor) -> Tensor:
        """Return the codes of x over its block's scale."""
        assert scale is not None
        codes = encode_table(x * ((254 - scale) << 23).view(torch.float32), words, self.table)
        if nonzero is False or not self.table.has_zero:
            return codes
        return torch.where((x > 0) & (codes == 0) & nonzero, 1, codes)

    def to_wide(self, codes: Tensor) -> Tensor:
        """Return int32."""
        return codes.to(torch.int32)

    def decode(self, wide: Tensor, scale: Tensor | None, words: Tensor | None = None) -> Tensor:
        """Return the numbers times their block's scale."""
        assert scale is not None
        unit = torch.where(scale == NAN_SCALE, math.nan, (scale << 23).view(torch.float32))
        return decode_table(wide, self.table) * unit
