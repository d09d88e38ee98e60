"""Errors from torch's tools that need gradients after backward, when release frees the gradients."""

import functools
import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from halfstep_torch.gradients.hooks import owner_of

_FUNCTION = "release_gradients"
_CLIPPING = "_clip_grads_with_norm_"
"""Function that `clip_grad_norm_` calls at its end, for any import of the latter."""
_BY_A_NORM = "clip_grads_with_norm_"
"""Public name of this function in `torch.nn.utils`, for clipping by a given norm."""


def refuse_freed(caller: str, params: list[Tensor]) -> None:
    """Raise RuntimeError if gradients of parameters are freed during backward."""
    if released := sum(owner_of(param) == _FUNCTION for param in params):
        raise RuntimeError(
            f"{caller}: {_FUNCTION} has freed {released} gradients during backward, and a norm of what is "
            f"left would clip none. Clip each by its own norm, {_FUNCTION}(optimizer, max_norm=1.0), or call "
            "remove() of what it returned."
        )


@functools.cache
def watch_clipping() -> None:
    """Make torch's clipping raise for parameters with freed gradients. Other calls are unchanged.

    Without this, clipping would find `grad` None and return 0 without a message.
    """
    of_torch = getattr(clip_grad, _CLIPPING, None)
    if of_torch is not None:
        for module, name in ((clip_grad, _CLIPPING), (torch.nn.utils, _BY_A_NORM)):
            setattr(module, name, _watched(of_torch))


def _watched(of_torch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(of_torch)
    def clip(parameters: Tensor | Iterable[Tensor], *args: object, **kwargs: object) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        refuse_freed("torch.nn.utils.clip_grad_norm_", listed)
        of_torch(listed, *args, **kwargs)

    return clip


def refuse_scaler() -> None:
    """Raise RuntimeError if a GradScaler has scaled a loss, because this backward may be of that loss.

    A gradient does not show whether it is scaled. So all objects are searched for a scaler, in about 0.1 s.
    """
    for x in gc.get_objects():
        if issubclass(type(x), torch.amp.GradScaler) and getattr(x, "_scale", None) is not None:
            raise RuntimeError(
                f"{_FUNCTION}: a GradScaler has scaled a loss by {x.get_scale():g}, and this backward would "
                "step by scaled gradients. Nothing is changed. Train without a scaler (bfloat16 needs none; "
                "delete one of an earlier run), or step after backward."
            )
