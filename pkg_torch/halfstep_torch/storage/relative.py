"""A first moment in units of the second moment's root: `relative`, and the arithmetic of the unit.

Contract: F12, F13, F18. Adam divides the first moment by the root of the second. In this unit it is bounded
and needs no scale.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from halfstep.storage import relative as shared
from halfstep.storage.formats import returning
from halfstep.storage.fourth_roots import inverse_power_of_root, power_of_root
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.storage.formats import Format

relative = returning(Format, shared.relative)


def into_unit(fmt: Format, m: Tensor, unit: "Unit") -> Tensor:
    """Return m, float32, in the unit of its format, given the second moment as it was stored."""
    if fmt.power_unit:
        return m * inverse_power_of_root(XP, unit.codes)
    return within_scales(to_unit(m, unit.values), fmt)


def out_of_unit(fmt: Format, z: Tensor, unit: "Unit") -> Tensor:
    """Undo `into_unit`."""
    return z * power_of_root(XP, unit.codes) if fmt.power_unit else from_unit(z, unit.values)


class Unit(Protocol):
    """A stored second moment, as values or as codes."""

    @property
    def values(self) -> Tensor:
        """float32."""
        ...

    @property
    def codes(self) -> Tensor:
        """int32."""
        ...


def to_unit(m: Tensor, v: Tensor) -> Tensor:
    """Return m / sqrt(v), or 0 if v is 0 or subnormal."""
    # All ones if v is normal, infinite or NaN.
    kept = -(v.view(torch.int32) & 0x7F800000) >> 31
    return ((m / sqrt(v)).view(torch.int32) & kept).view(torch.float32)


def within_scales(z: Tensor, fmt: Format) -> Tensor:
    """Return z with finite numbers limited to the range of fine scales, past which a block is NaN."""
    if not fmt.scaled:
        return z
    largest = shared.largest(fmt)
    return torch.where(z.abs() < math.inf, z.clamp(-largest, largest), z)


def from_unit(z: Tensor, v: Tensor) -> Tensor:
    """Return z sqrt(v)."""
    return z * sqrt(v)
