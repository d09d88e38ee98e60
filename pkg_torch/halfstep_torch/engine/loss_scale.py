"""Gradients of a scaled loss: what `torch.amp.GradScaler` tells an optimizer, and what becomes of it.

The scaler leaves the gradients as they are and sets `grad_scale` and `found_inf` on the optimizer for the
time of a step. They are then unscaled in float32, on their way into the chain: in float16 that would lose
what the scale has saved.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.rule import number
from halfstep_torch.links.link import Link


def _check_scale(caller: str, name: str, value: Any, number: float) -> None:
    if not 0 < number < math.inf:
        raise ValueError(f"{caller}: {name}={value} is no scale. Use a number > 0.")


class Unscale(Link):
    """The link before all others in a step of scaled gradients: they times the inverse scale, in float32."""

    grad_scale: Any = number(1.0, check=_check_scale)

    def numbers(self, h: Any, t: int, op: Any) -> Mapping[str, Any]:
        """Return the inverse of the scale."""
        return {"inverse_scale": np.float32(1) / h.grad_scale}

    def update(self, g, p, n, m, op):
        """Return g times 1 / scale, rounded once; for a power of two, not at all."""
        return n.inverse_scale * g


UNSCALE = Unscale()


def scale_of(optimizer: Any) -> float | None:
    """Return by what the gradients of a step are scaled; None where they are not, or not any more."""
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else float(scale)


def is_skipped(optimizer: Any) -> bool:
    """Whether a scaler has found an infinity or a NaN among the gradients of this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and float(found_inf) != 0


class Unscaled(Sequence):
    """Gradients without their scale, in float32: one at a time, whenever it is asked for."""

    def __init__(self, grads: Sequence[Tensor], scale: float):
        self._grads, self._inverse = grads, float(np.float32(1) / np.float32(scale))

    def __len__(self) -> int:
        return len(self._grads)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._grads[index].to(torch.float32) * self._inverse
