"""A monitor of a run: every N steps it measures on the device what rounding loses."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep import monitor
from halfstep.monitor import corner
from halfstep_torch.distributed.shards import local_part
from halfstep_torch.report.moment_probe import PAIRS
from halfstep_torch.report.probe_steps import (
    NARROW,
    any_optimizer,
    is_moment,
    rounded_to_nearest,
    second_moments,
)
from halfstep_torch.storage.ends import count_at_ends


class Monitor(monitor.Monitor):  # noqa: D101 (its base has it)
    _package = "halfstep_torch"
    _second = next(iter(PAIRS))

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 100):
        super().__init__(every)
        self._optimizer = any_optimizer("Monitor", optimizer)

    def read(self) -> dict[str, float] | None:
        """Return a row at every `every`-th call, of the step that was taken, else None."""
        return self._row()

    def _corners(self) -> dict[Tensor, Tensor]:
        params = (p for group in self._optimizer.param_groups for p in group["params"])
        return {p: _corner(p).clone() for p in params if p.requires_grad}

    def _measured(self, before: dict[Tensor, Tensor]) -> tuple[list[float], set[str]]:
        return _measured(self._optimizer, before), _formats(self._optimizer)


def _corner(p: Tensor) -> Tensor:
    here = local_part(p.detach())
    return here[corner(here.shape)] if here.dim() else here


@torch.no_grad()
def _measured(optimizer: torch.optim.Optimizer, before: dict[Tensor, Tensor]) -> list[float]:
    """Return a row's numbers, in the order of `NUMBERS`, but for squares of norms."""
    narrow = [p for p in before if p.dtype in NARROW]
    lossy = set(rounded_to_nearest(optimizer, narrow))
    rows = [_sums(optimizer, p, old, p in lossy) for p, old in before.items()]
    lost, due, moved, weights = torch.stack([row.to(rows[0].device) for row in rows]).sum(0)
    low, high, size = torch.zeros_like(lost), torch.zeros_like(lost), 0
    for ends, count in _at_ends(optimizer):
        low, high, size = low + ends[0].to(low), high + ends[1].to(high), size + count
    shares = [low / max(size, 1), high / max(size, 1)]
    numbers = torch.stack([lost / due.clamp(min=1), moved, weights, *shares]).tolist()
    # A sum of squares that is finite has finite summands: then nothing is counted one by one.
    finite = all(map(math.isfinite, numbers))
    return [*numbers, 0.0 if finite else sum(int((~torch.isfinite(local_part(p))).sum()) for p in before)]


def _sums(optimizer: torch.optim.Optimizer, p: Tensor, old: Tensor, lossy: bool) -> Tensor:
    """Return for a weight: lost updates, updates, and the squared norms of its movement and of itself."""
    here, now = local_part(p.detach()), _corner(p)
    due = torch.full(now.shape, p.dtype in NARROW, device=now.device)
    if lossy:
        state = optimizer.state.get(p, {})
        kept = [_corner(x) for key, x in state.items() if is_moment(p, key, x) and x.is_floating_point()]
        due = torch.stack([x != 0 for x in kept]).any(0) if kept else due
    moved = torch.linalg.vector_norm(now.float() - old.float()) ** 2
    weights = torch.linalg.vector_norm(here, dtype=torch.float32) ** 2
    lost = (due & (now == old)).sum() if lossy else due.new_zeros(())
    scale = here.numel() / max(now.numel(), 1)
    return torch.stack([lost * scale, due.sum() * scale, moved * scale, weights])


def _at_ends(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[Tensor, Tensor], int]]:
    """Yield the number of elements of our second moments at the ends of their codes, and of all elements."""
    for _, second, first, state in second_moments(optimizer):
        if (ends := count_at_ends(second, first, state)) is not None:
            yield ends, state[second.key].numel()


def _formats(optimizer: torch.optim.Optimizer) -> set[str]:
    return {second.format.dtype for _, second, _, _ in second_moments(optimizer)}
