"""Codes of the numbers of a table.

Contract: F8 to F10.
"""

import dataclasses

import numpy as np

from halfstep_spec.storage.base_codes import Codes
from halfstep_spec.storage.tables import Table, decode_table, encode_table


@dataclasses.dataclass(frozen=True)
class TableCodes(Codes):
    """Numbers of a table: the stored value is the number of a code times 2^(byte - 127).

    Attributes:
        table: of the codes.
    """

    table: Table

    @property
    def signed(self) -> bool:
        """As the table."""
        return self.table.signed

    @property
    def for_second_moments(self) -> bool:
        """A sign that is always the same costs half of the numbers, and the small ones."""
        return not self.table.signed

    @property
    def half_gap(self) -> float:
        """That of the numbers in the top decade."""
        return self.table.half_gap

    @property
    def carry(self) -> int:
        """That of the table."""
        return self.table.carry

    @property
    def scale_range(self) -> tuple[int, int]:
        """Half of the smallest number, and the inverse of the largest scale, are normal in float32."""
        return self.table.lowest, 253

    def encode(self, x, scale, words, nonzero) -> np.ndarray:
        """Return the codes of x over its block's scale."""
        assert scale is not None
        with np.errstate(under="ignore", invalid="ignore", over="ignore"):
            y = np.ldexp(x, 127 - scale.astype(np.int32)).astype(np.float32)
        codes = encode_table(y, words, self.table)
        return np.where(nonzero & (codes == 0), np.uint8(1), codes)

    def decode(self, codes, scale, words=None) -> np.ndarray:
        """Return the numbers times their block's scale."""
        assert scale is not None
        return np.ldexp(decode_table(codes, self.table), scale.astype(np.int32) - 127).astype(np.float32)
