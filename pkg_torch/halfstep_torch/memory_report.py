"""How many bytes a model and its optimizer take, by param group, beside float32 AdamW."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.text_table import in_units, text_table
from halfstep_torch.description import is_frozen, state_bytes
from halfstep_torch.distributed.shards import window_of
from halfstep_torch.optimizer import Optimizer, check_optimizer

FLOAT32_ADAMW = 16
"""Bytes per parameter of float32 weights, gradients and the two moments of AdamW."""


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """Bytes of the parameters of one param group, or of all.

    Attributes:
        name: "group 0", ..., "not stepped" or "all".
        params: how many numbers the parameters have.
        weights: bytes of the weights.
        gradients: bytes of their gradients, in the weights' dtype, once backward has run.
        state: bytes of what the optimizer keeps, once it has stepped.
        float32_adamw: bytes of the same parameters in float32 under AdamW. For frozen parameters and
            for parameters that are not stepped, bytes of the weights alone.
        here: bytes of weights, gradients and state in this process; less than all where parameters are
            DTensors.
    """

    name: str
    params: int
    weights: int
    gradients: int
    state: int
    float32_adamw: int
    here: int

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and state."""
        return self.weights + self.gradients + self.state


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What `memory_report` returns; `print` shows it as a table.

    Attributes:
        groups: of every param group and, if there are any, of parameters that are not stepped.
        all: the sum of them.
    """

    groups: tuple[GroupMemory, ...]
    all: GroupMemory

    def __str__(self) -> str:
        head = ("", "params", "weights", "gradients", "state", "total", "B/param", "float32 AdamW")
        cut = self.all.here != self.all.total
        head = (*head, "here") if cut else head
        rows: list[tuple[str, ...]] = []
        for row in (*self.groups, self.all):
            counts = (row.weights, row.gradients, row.state, row.total)
            per_param = f"{row.total / row.params:.2f}" if row.params else "-"
            rows.append(
                (
                    row.name,
                    f"{row.params:,}",
                    *map(in_units, counts),
                    per_param,
                    in_units(row.float32_adamw),
                    *([in_units(row.here)] if cut else []),
                )
            )
        return text_table(head, rows, right=range(1, len(head)))


def memory_report(model: torch.nn.Module, optimizer: Optimizer) -> MemoryReport:
    """Return the bytes of weights, gradients and optimizer state: what they are, or will be, in training.

    Computed from shapes and formats, so the model may be on the meta device. Activations and the temporary
    memory of a step are not part of it. State is as it stands after the first step; frozen parameters have
    none.

    Args:
        model: whose parameters are counted, those that are not stepped too.
        optimizer: of this package.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device="meta")
        >>> report = memory_report(model, hs.AdamW(model.named_parameters(), **hs.recipes.eight_bit))
        >>> report.all.total / report.all.params, report.all.float32_adamw / report.all.params
        (6.00782..., 16.0)

    Source: ours.
    """
    check_optimizer("memory_report", optimizer)
    plans = {param: plan for _, param, plan in optimizer.plans()}
    stepped = [param for param in plans if not is_frozen(optimizer, param)]
    states = {param: state_bytes(optimizer, param, plans[param]) for param in stepped}
    groups = [_group(f"group {i}", group["params"], states) for i, group in enumerate(optimizer.param_groups)]
    if others := [param for param in model.parameters() if param not in plans]:
        groups.append(_group("not stepped", others, states))
    sums = {
        field.name: sum(getattr(group, field.name) for group in groups)
        for field in dataclasses.fields(GroupMemory)
        if field.name != "name"
    }
    return MemoryReport(tuple(groups), GroupMemory(name="all", **sums))


def _group(name: str, params: Sequence[Tensor], states: dict[Tensor, tuple[int, int]]) -> GroupMemory:
    count = sum(param.numel() for param in params)
    stepped = sum(param.numel() for param in params if param in states)
    return GroupMemory(
        name=name,
        params=count,
        weights=sum(_bytes(param) for param in params),
        gradients=sum(_gradient_bytes(param) for param in params),
        state=sum(states.get(param, (0, 0))[0] for param in params),
        float32_adamw=FLOAT32_ADAMW * stepped + 4 * (count - stepped),
        here=sum(_bytes_here(param) + states.get(param, (0, 0))[1] for param in params),
    )


def _gradient_bytes(param: Tensor) -> int:
    if param.grad is not None:
        return _bytes(param.grad)
    return _bytes(param) if param.requires_grad else 0


def _bytes_here(param: Tensor) -> int:
    """Return the bytes of what this process has of weights and gradients."""
    elements = math.prod(window_of(param).shape)
    gradient = _gradient_bytes(param) // max(param.numel(), 1)
    return elements * (param.element_size() + gradient)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
