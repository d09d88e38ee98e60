"""A first moment in units of the root of the second one: `relative`, and the arithmetic of the unit.

Contract: F12, F13. Adam divides a first moment by the root of the second: in that unit it is bounded, and so
needs no scale.
"""

import math
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.numbers.exact import sqrt
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.storage.fine_codes import FINE_CODES, FIXED_CODES
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_dtypes import with_blocks

LARGEST_BOUND = 7.5
"""What codes without a scale hold."""


def relative(
    dtype: Any, block_size: int | str | None = None, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of a first moment in units of the root of the second one.

    With v the second moment as it is stored in the same step, what is rounded and stored is

        z = m / sqrt(v),   |z| <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),   7.27 at b1 = 0.9, b2 = 0.999

    and what a step goes on with is z sqrt(v). That is what an update is made of, so that an error of z is an
    error of the update of the same size wherever the gradients are large or small. Because of the bound 8
    bits need no scale at all. Rounds once, z; the quotient, the root and the product are float32's.

    Args:
        dtype: without a block size "float8_e3m4" (the better one, in uint8) or "int8", in steps of 1/16; with
            one "int8" or "int4" (two to a byte, dithered: with one random number per array and step added
            before rounding and subtracted after it).
        block_size: None for no scales, also for small arrays; else as in `scaled`, elements of a block or
            "row". The scales have three significant bits.
        min_size: with scales, arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.

    Returns:
        A format, for `mu_dtype` of rules with a second moment: `Adam`, `AdamW`, `Lamb`, `Lamb16`.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if there is no such format, or a size is out of range; from an optimizer, if its rule has
            no second moment, or if without scales its betas have no bound below 7.5.

    Example:
        >>> relative("int4", 32).code_shape((64, 256))
        (64, 128)

    Source: ours; the bound is Cauchy's and Schwarz's inequality. Subtractive dither: L. Roberts, "Picture
    coding using pseudo-random noise", IRE Trans. Inf. Theory 8(2), 1962. Contract F12 to F15.
    """
    name, names = dtype_name(dtype), FIXED_CODES if block_size is None else FINE_CODES
    if name not in names:
        use = " or ".join(f'"{one}"' for one in names)
        raise ValueError(f"relative: dtype={name} with block_size={block_size} is not a format. Use {use}.")
    if block_size is None:
        return Format(name, relative=True)
    return with_blocks("relative", name, block_size, min_size, min_ndim, scale="fine", relative=True)


def to_unit(m: Tensor, v: Tensor) -> Tensor:
    """Return z = m / sqrt(v), and 0 where v is 0 or subnormal: rounded twice.

    Args:
        m: float32, the first moment.
        v: float32, the second moment as it was stored.
    """
    # All ones where v is normal, infinite or NaN.
    kept = -(v.view(torch.int32) & 0x7F800000) >> 31
    return ((m / sqrt(v)).view(torch.int32) & kept).view(torch.float32)


def from_unit(z: Tensor, v: Tensor) -> Tensor:
    """Return m = z sqrt(v): rounded twice."""
    return z * sqrt(v)


def bound(b1: float, b2: float) -> float:
    """Return the largest |z| of averages of g and g g, by Cauchy and Schwarz; infinity if there is none.

    Example:
        >>> round(bound(0.9, 0.999), 2)
        7.27
    """
    if b1 * b1 >= b2:
        return math.inf
    return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
