"""Gradients of a scaled loss, the attributes set by `torch.amp.GradScaler`, and the link that unscales.

The scaler does not change the gradients, and sets `grad_scale` and `found_inf` on the optimizer during a
step. The first link unscales the gradients in float32, because in float16 small
gradients would be lost.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Scalar
from halfstep.rule import number
from halfstep_torch.links.link import Link


def _check_scale(caller: str, name: str, value: Scalar, number: float) -> None:
    if not 0 < number < math.inf:
        raise ValueError(f"{caller}: {name}={value} is no scale. Use a number > 0.")


class Unscale(Link):
    """The first link in a step of scaled gradients, g times the inverse scale in float32."""

    grad_scale: Scalar = number(1.0, check=_check_scale)

    def numbers(self, h, t, op):
        """Return the inverse of the scale."""
        return {"inverse_scale": np.float32(1) / h.grad_scale}

    def update(self, g, p, n, m, op):
        """Return g times 1 / scale, rounded once, which is exact for a power of two."""
        return n.inverse_scale * g


UNSCALE = Unscale()


def scale_of(optimizer: object) -> float | None:
    """Return the scale of a step's gradients, or None if they are not scaled or already unscaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else float(scale)


def is_skipped(optimizer: object) -> bool:
    """Whether a scaler has found an infinity or a NaN among the gradients of this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and float(found_inf) != 0


class Unscaled(Sequence):
    """Unscaled float32 gradients, computed one at a time when they are read."""

    def __init__(self, grads: Sequence[Tensor], scale: float):
        self._grads, self._inverse = grads, float(np.float32(1) / np.float32(scale))

    def __len__(self) -> int:
        return len(self._grads)

    def __getitem__(self, index: Any) -> Any:  # as of any sequence
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._grads[index].to(torch.float32) * self._inverse
