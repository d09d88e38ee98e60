"""A first moment in units of the root of the second one: `relative`, and the arithmetic of the unit.

Contract: F12, F13. Adam divides a first moment by the root of the second: in that unit it is bounded, and so
needs no scale.
"""

import torch
from torch import Tensor

from halfstep.storage import relative as shared
from halfstep.storage.formats import returning
from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.storage.formats import Format

relative = returning(Format, shared.relative)


def to_unit(m: Tensor, v: Tensor) -> Tensor:
    """Return z = m / sqrt(v), and 0 where v is 0 or subnormal: rounded twice."""
    # All ones where v is normal, infinite or NaN.
    kept = -(v.view(torch.int32) & 0x7F800000) >> 31
    return ((m / sqrt(v)).view(torch.int32) & kept).view(torch.float32)


def from_unit(z: Tensor, v: Tensor) -> Tensor:
    """Return m = z sqrt(v): rounded twice."""
    return z * sqrt(v)
