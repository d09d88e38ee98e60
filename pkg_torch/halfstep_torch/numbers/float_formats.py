"""The 8- and 16-bit floating-point formats as float32 sees them: a table, no functions of data.

Names are those of ml_dtypes and of torch. Contract: section R.
"""

import dataclasses
import math
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format of at most 16 bits.

    Attributes:
        dtype: the torch dtype that holds it; uint8, for its patterns, where torch has none.
        mantissa_bits: explicit bits of the significand (p in the contract).
        min_exponent: exponent of the smallest normal number.
        largest: the largest finite value.
        overflow: what stands past it: infinity, or NaN where the format has no infinity.
    """

    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int
    largest: float
    overflow: float


FLOAT_FORMATS = {
    "bfloat16": FloatFormat(torch.bfloat16, 7, -126, (2 - 2**-7) * 2.0**127, math.inf),
    "float16": FloatFormat(torch.float16, 10, -14, 65504.0, math.inf),
    "float8_e4m3fn": FloatFormat(torch.float8_e4m3fn, 3, -6, 448.0, math.nan),
    "float8_e5m2": FloatFormat(torch.float8_e5m2, 2, -14, 57344.0, math.inf),
    "float8_e3m4": FloatFormat(torch.uint8, 4, -2, 15.5, math.inf),
}


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype: "bfloat16" for torch.bfloat16 and for "bfloat16"."""
    return str(dtype).removeprefix("torch.")
