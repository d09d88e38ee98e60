"""How a state array is stored: encode float32 to codes, decode codes to float32.

Contract: section F. A `Format` is all that an update rule knows of storage, and it knows
nothing of update rules.
"""

import dataclasses

import torch
from torch import Tensor

from halfstep_torch.float_formats import FLOAT_FORMATS, dtype_name
from halfstep_torch.rounding import round_value

_PLAIN_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Format:
    """A plain state dtype: codes are values of that dtype, elementwise, with no scale.

    Attributes:
        name: "float32", "bfloat16" or "float16".
    """

    name: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return _PLAIN_STATE_DTYPES[self.name]

    def zeros_like(self, param: Tensor) -> Tensor:
        """Return the codes of zero for every element of `param`, row-major whatever the layout of `param`."""
        return torch.zeros(param.shape, dtype=self.dtype, device=param.device)

    def encode(self, x: Tensor, words: Tensor | None) -> Tensor:
        """Round the float32 `x` to codes: finite values saturate, infinity becomes NaN (contract R6).

        Args:
            x: float32.
            words: int32 words for stochastic rounding, or None for nearest.
        """
        return round_value(x, self.name, words, saturate=True)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of `codes`: exact."""
        return codes.to(torch.float32)

    @property
    def rounds(self) -> bool:
        """Whether encoding rounds at all."""
        return self.name != "float32"

    @property
    def gap_exponent(self) -> int:
        """k, where 2^-k is half the largest relative gap between neighbouring codes."""
        return FLOAT_FORMATS[self.name].mantissa_bits + 1

    def freezes(self, b: float) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short of its mean: 1 - b < 2^-(p + 1).

        p is the number of explicit mantissa bits; float32 is taken as never freezing (contract F3).

        Args:
            b: decay rate, a float32 value.
        """
        return self.rounds and 1.0 - b < 2.0**-self.gap_exponent


def resolve_format(name: str | None, param_dtype: torch.dtype) -> Format:
    """Return the format of a moment; None means bfloat16 for bfloat16 params, else float32 (contract F1)."""
    if name is None:
        name = "bfloat16" if param_dtype == torch.bfloat16 else "float32"
    return Format(name)


def as_format_name(function: str, name: str, dtype) -> str | None:
    """Return a dtype argument as its name, or None.

    Args:
        function: whose argument it is, for the message.
        name: of the argument.
        dtype: "bfloat16", torch.bfloat16, ... or None.

    Raises:
        ValueError: if no moment can be stored so.
    """
    if dtype is None:
        return None
    given = dtype_name(dtype)
    if given in _PLAIN_STATE_DTYPES:
        return given
    use = 'Use "bfloat16", "float16" or "float32".'
    if given in FLOAT_FORMATS:
        raise ValueError(f"{function}: {name}={given} cannot hold a moment without a block scale. {use}")
    raise ValueError(f"{function}: {name}={given} is not a state dtype. {use}")
