"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from halfstep_torch.chain import Codes, Link, Update, Words
from halfstep_torch.formats import Format
from halfstep_torch.random_words import Role, check_seed
from halfstep_torch.rounding import dtype_name, round_value

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def apply_updates(p: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return nearest(p + u) in `dtype`: the weight as it is stored, in every backend (contract P1).

    Args:
        p: the weights, float32.
        u: the update, float32.
        dtype: of the weights.
    """
    return round_value(p + u, dtype_name(dtype), None, saturate=False)


def check_param(function: str, name: str | int, param: Tensor) -> None:
    """Raise TypeError or ValueError unless weights like these can be stepped in place.

    Args:
        function: for the message.
        name: of the parameter.
        param: the weights.
    """
    if hasattr(param, "__tensor_flatten__") or param.layout != torch.strided:
        kind = f"a {type(param).__name__}" if param.layout == torch.strided else "sparse"
        raise TypeError(f"{function}: parameter {name!r} is {kind}. Pass plain dense tensors.")
    if param.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"{function}: parameter {name!r} is {dtype_name(param.dtype)}; "
            "weights are float32, bfloat16 or float16. Cast it."
        )
    if any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise ValueError(f"{function}: elements of parameter {name!r} share memory. Pass param.clone().")


def check_grad(function: str, name: str, param: Tensor) -> None:
    """Raise TypeError or ValueError unless the gradient of `param` can be used.

    Args:
        function: for the message.
        name: of the parameter.
        param: the weights.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise TypeError(
            f"{function}: the gradient of {name!r} is sparse; gradients are dense. Use sparse=False in the layer."
        )
    if grad.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"{function}: the gradient of {name!r} is {dtype_name(grad.dtype)}; "
            "gradients are float32, bfloat16 or float16. Cast it."
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"{function}: the gradient of {name!r} has shape {tuple(grad.shape)} on {grad.device}, "
            f"its parameter {tuple(param.shape)} on {param.device}. Run backward again."
        )


def check_state_array(function: str, name: str, key: str, fmt: Format, array: Tensor, param: Tensor) -> None:
    """Raise ValueError unless a state array fits its parameter and format.

    Args:
        function: for the message.
        name: of the parameter.
        key: of the state array.
        fmt: how it is to be stored.
        array: the state.
        param: the weights.
    """
    if array.dtype != fmt.dtype:
        raise ValueError(
            f"{function}: {key} of {name!r} is stored in {dtype_name(array.dtype)}, its group says {fmt.name}. "
            "Set formats before the first step."
        )
    if array.shape != param.shape or array.device != param.device:
        raise ValueError(
            f"{function}: {key} of {name!r} has shape {tuple(array.shape)} on {array.device}, "
            f"its parameter {tuple(param.shape)} on {param.device}. "
            "Make the optimizer once the model has its shape and device."
        )


@dataclasses.dataclass(frozen=True)
class LandingRule:
    """The update that lands on a stochastically rounded weight.

    Attributes:
        dtype: name of the weights' dtype.
    """

    formats: ClassVar[Mapping[str, Format]] = {}
    roles: ClassVar[tuple[Role, ...]] = (Role.PARAM,)
    number_names: ClassVar[tuple[str, ...]] = ()
    dtype: str

    def update(self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words) -> Update:
        """Return q - p, q = stochastic(p + u), and -0.0 where q = p (contract P2)."""
        q = round_value(p + u, self.dtype, words(Role.PARAM), saturate=False).to(torch.float32)
        # -0.0 is the one number that moves no weight: neither an infinity nor a zero of either sign.
        return torch.where(q == p, -0.0, q - p), {}


@dataclasses.dataclass(frozen=True)
class RoundStochastically(Link):
    """The transform that `round_stochastically` returns."""

    function: ClassVar[str] = "round_stochastically"
    last: ClassVar[bool] = True
    seed: int

    def rule(self, function: str, values: tuple, dtype: torch.dtype) -> LandingRule | None:
        """Float32 weights pass through."""
        return None if dtype == torch.float32 else LandingRule(dtype_name(dtype))


def round_stochastically(seed: int | Sequence[int] = 0) -> Link:
    """Land on weights that are rounded stochastically; the last link of a chain.

    q = stochastic(p + u) in the dtype of p; the link emits q - p in float32, and -0.0 where q = p, so that
    nearest(p + u), which is how every weight is stored, gives q. float32 weights pass through.

    Rounds p + u to float32, then to the dtype of p: away from zero in magnitude with a probability of the
    discarded fraction, so that updates far below the spacing of the weights arrive on average.

    Args:
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A transform, for `chain` and `Optimizer`.

    Raises:
        TypeError: if the seed is not an integer or a pair.
        ValueError: if it is out of range.

    Example:
        >>> round_stochastically(seed=7).seed
        7

    Source: contract P2, P3, R3.
    """
    return RoundStochastically(check_seed("round_stochastically", seed))
