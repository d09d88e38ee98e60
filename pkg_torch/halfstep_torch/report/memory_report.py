"""The bytes of a model and its optimizer: in total, by array and by param group."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.memory_report import FLOAT32_ADAMW, GRADIENTS, WEIGHTS, MemoryReport
from halfstep_torch.distributed.shards import window_of
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.report.description import Bytes, array_bytes, is_frozen
from halfstep_torch.report.temporaries import temporary_bytes

STEP = "step"
"""Key for the count of a parameter, an int64."""


def memory_report(model: torch.nn.Module, optimizer: Optimizer | None = None) -> MemoryReport:
    """Report the bytes that weights, gradients and state take, or will take, beside float32 AdamW.

    The bytes are computed from shapes and formats, so the model may be on the meta device. Activations are
    not included. State is as after the first step, and frozen parameters have none. A device is this process.
    Temporaries of a step, as in Muon and Adafactor, are as on a GPU, and are not in the totals.

    Args:
        model: the model. Parameters that are not optimized are counted too.
        optimizer: an optimizer of this package.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device="meta")
        >>> report = memory_report(model, hs.AdamW(model.named_parameters(), **hs.recipes.eight_bit))
        >>> report.total / report.size, report.float32 / report.size
        (6.00782..., 16.0)

    Source: ours.
    """
    if optimizer is None:
        raise TypeError("memory_report: the optimizer is missing. Pass the model, then the optimizer.")
    optimizer = check_optimizer("memory_report", optimizer)
    plans = {param: plan for _, param, plan in optimizer.plans()}
    states = {
        param: {**array_bytes(optimizer, param, plan), STEP: (torch.int64.itemsize,) * 2}
        for param, plan in plans.items()
        if not is_frozen(optimizer, param)
    }
    listed = {f"group {i}": group["params"] for i, group in enumerate(optimizer.param_groups)}
    if others := [param for param in model.parameters() if param not in plans]:
        listed["not stepped"] = others
    parts = {name: _part(params, states) for name, params in listed.items()}
    whole = _part([p for params in listed.values() for p in params], states)
    return dataclasses.replace(whole, parts=parts, temporaries=temporary_bytes(optimizer))


def _part(params: Sequence[Tensor], states: dict[Tensor, dict[str, Bytes]]) -> MemoryReport:
    """Return the report for some parameters."""
    in_all, here, float32 = Counter(), Counter(), Counter()
    for p in params:
        size, on_one = p.numel(), math.prod(window_of(p).shape)
        gradient = _gradient_bytes(p) // max(size, 1)
        for counts, elements, i in ((in_all, size, 0), (here, on_one, 1)):
            counts[WEIGHTS] += elements * p.element_size()
            counts[GRADIENTS] += elements * gradient
            counts.update({key: nbytes[i] for key, nbytes in states.get(p, {}).items()})
            float32[i] += elements * (FLOAT32_ADAMW if p in states else 4)
    return MemoryReport(sum(p.numel() for p in params), dict(in_all), dict(here), float32[0], float32[1])


def _gradient_bytes(param: Tensor) -> int:
    if param.grad is not None:
        return param.grad.numel() * param.grad.element_size()
    return param.numel() * param.element_size() if param.requires_grad else 0
