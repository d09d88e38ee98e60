"""A monitor of a run, which measures losses from rounding on the device every N steps."""

import math

import torch
from torch import Tensor

from halfstep import monitor
from halfstep.diagnosis import Ends
from halfstep.monitor import corner
from halfstep_torch.distributed.collectives import by_mesh, reduce_sum, total_counts
from halfstep_torch.distributed.shards import counts_here, is_sharded, local_part
from halfstep_torch.report.moment_probe import PAIRS
from halfstep_torch.report.probe_steps import (
    NARROW,
    any_optimizer,
    is_moment,
    rounded_to_nearest,
    second_moments,
)
from halfstep_torch.storage.ends import count_at_ends

Before = dict[Tensor, tuple[Tensor, float | None]]
"""First elements and step count of each parameter before a step."""


class Monitor(monitor.Monitor):  # noqa: D101 (its base has it)
    _package = "halfstep_torch"
    _second = next(iter(PAIRS))

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 100):
        super().__init__(every)
        self._optimizer = any_optimizer("Monitor", optimizer)

    def read(self) -> dict[str, float] | None:
        """Return a row for the last step at every `every`-th call, else None."""
        return self._row()

    def _corners(self) -> Before:
        params = (p for group in self._optimizer.param_groups for p in group["params"])
        return {p: (_corner(p).clone(), _steps(self._optimizer, p)) for p in params if p.requires_grad}

    def _measured(self, before: Before) -> list[float]:
        return _measured(self._optimizer, before)

    @torch.no_grad()
    def _ends(self) -> dict[str, dict[str, Ends]]:
        counted = []
        for p, second, first, state in second_moments(self._optimizer):
            if (ends := count_at_ends(second, first, state)) is not None:
                counted.append((p, second.format.dtype, ends))
        totals = total_counts([p for p, _, _ in counted], [tuple(map(int, ends)) for _, _, ends in counted])
        names, found = _labels(self._optimizer), {}
        for (p, fmt, _), (low, high) in zip(counted, totals, strict=True):
            found.setdefault(fmt, {})[names[p]] = (low, high, p.numel())
        return found


def _labels(optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the name of each parameter, or its index over all groups."""
    labels = {}
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            labels[p] = group["param_names"][i] if "param_names" in group else str(len(labels))
    return labels


def _corner(p: Tensor) -> Tensor:
    here = local_part(p.detach())
    return here[corner(here.shape)] if here.dim() else here


def _steps(optimizer: torch.optim.Optimizer, p: Tensor) -> float | None:
    """Return the step count in a parameter's state, or None if it has none."""
    step = optimizer.state.get(p, {}).get("step")
    return float(step) if isinstance(step, (int, float, Tensor)) else None


@torch.no_grad()
def _measured(optimizer: torch.optim.Optimizer, before: Before) -> list[float]:
    """Return the share of lost updates, the squares of both norms, and the number of nonfinite weights."""
    lossy = set(rounded_to_nearest(optimizer, [p for p in before if p.dtype in NARROW]))
    sums = {p: _sums(optimizer, p, old, p in lossy) for p, old in before.items()}
    numbers = _totals(sums)
    lost, due, moved, weights = numbers
    nonfinite = 0.0
    # A finite sum of squares has finite summands, so no element needs to be counted.
    if not all(map(math.isfinite, numbers)):
        (nonfinite,) = _totals({p: (~local_part(p).isfinite()).sum().reshape(1).float() for p in before})
    return [lost / max(due, 1), moved, weights, nonfinite]


def _totals(sums: dict[Tensor, Tensor]) -> list[float]:
    """Return the sums over all parameters and, for DTensors, over the processes of their mesh."""
    plain = [p for p in sums if not is_sharded(p)]
    totals = [_total([sums[p] for p in plain])] if plain else []
    for mesh, params in by_mesh([p for p in sums if is_sharded(p)], lambda p: p).items():
        here = _total([sums[p] * counts_here(p) for p in params])
        totals.append(reduce_sum(here.to(mesh.device_type), mesh))
    return _total(totals).tolist()


def _total(rows: list[Tensor]) -> Tensor:
    return torch.stack([row.to(rows[0].device) for row in rows]).sum(0)


def _sums(
    optimizer: torch.optim.Optimizer, p: Tensor, before: tuple[Tensor, float | None], lossy: bool
) -> Tensor:
    """Return a weight's lost updates, its updates, and the squared norms of its movement and itself."""
    old, steps = before
    here, now = local_part(p.detach()), _corner(p)
    # The count does not rise if a scaler skips a step, or if gradients are still accumulated.
    taken = p.dtype in NARROW and (steps is None or steps != _steps(optimizer, p))
    due = torch.full(now.shape, taken, device=now.device)
    if lossy and taken:
        state = optimizer.state.get(p, {})
        kept = [_corner(x) for key, x in state.items() if is_moment(p, key, x) and x.is_floating_point()]
        due = torch.stack([x != 0 for x in kept]).any(0) if kept else due
    moved = torch.linalg.vector_norm(now.float() - old.float()) ** 2
    weights = torch.linalg.vector_norm(here, dtype=torch.float32) ** 2
    lost = (due & (now == old)).sum() if lossy else due.new_zeros(())
    scale = here.numel() / max(now.numel(), 1)
    sums = [lost * scale, due.sum() * scale, moved * scale, weights]
    return torch.stack([x.float() for x in sums])
