"""One operation on many tensors in one call of torch."""

import torch
from torch import Tensor


def for_each(operation: str, tensors: list[Tensor], other: list[Tensor] | float) -> None:
    """Call a method of every tensor, by torch's foreach function if there is one.

    The method changes its tensor. `other` is its argument; a list has an argument for every tensor.
    """
    together = getattr(torch, f"_foreach_{operation}", None)
    if together is not None:
        together(tensors, other)
        return
    others = other if isinstance(other, list) else [other] * len(tensors)
    for tensor, argument in zip(tensors, others, strict=True):
        getattr(tensor, operation)(argument)
