"""The operations of `halfstep.arrays` on tensors."""

import math

import torch
from torch import Tensor

from halfstep.storage.base_codes import NAN_SCALE
from halfstep_torch.numbers.tables import decode_table, encode_table


class TorchArrays:
    """Operations of torch, which rounds each of them once."""

    product, quotient = staticmethod(torch.mul), staticmethod(torch.div)
    table_codes, table_numbers = staticmethod(encode_table), staticmethod(decode_table)

    def bits(self, x):
        """Return the patterns of float32."""
        return x.view(torch.int32)

    def floats(self, bits):
        """Return the numbers of patterns."""
        return bits.view(torch.float32)

    def real(self, x):
        """Return float32."""
        return x.to(torch.float32)

    def integer(self, x):
        """Return int32, toward zero."""
        return x.to(torch.int32)

    def wide(self, scale):
        """Return scales, which are int32 here."""
        return scale

    def stored(self, codes, dtype):
        """Return codes as they are: a round trip decodes them before they are cast."""
        return codes

    def shift(self, bits, by):
        """Return patterns moved down: int32 shifts drag the sign along."""
        moved = bits >> by
        moved &= (1 << (32 - by)) - 1
        return moved

    def sign(self, x, bit):
        """Return `bit` where x has a sign, without a comparison, which takes more instructions."""
        bits = x.view(torch.int32)
        # The sum passes the sign on up to infinity, and of no NaN.
        return ((bits & (bits + 0x7FFFFF)) >> 24) & bit

    def nearest(self, x):
        """Return the nearest whole numbers."""
        return x.round()

    def where(self, mask, x, y):
        """Return x where a mask holds, else y."""
        return torch.where(mask, x, y)

    def square(self, x):
        """Return x x, of which the compiler evaluates x once."""
        return x.square()

    def clip(self, x, low=None, high=None):
        """Return x between two bounds."""
        if isinstance(low, Tensor):
            x, low = x.maximum(low), None
        return x if low is high is None else x.clamp(low, high)

    def unit(self, scale, down=0):
        """Return 2^(`scale` - `down` - 127), or NaN of a mark."""
        field = scale - down if down else scale
        return torch.where(scale == NAN_SCALE, math.nan, (field << 23).view(torch.float32))

    def behind(self, x):
        """Return the same: no product is fused."""
        return self


XP = TorchArrays()
