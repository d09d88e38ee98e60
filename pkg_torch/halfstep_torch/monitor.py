"""What a run loses while it trains: a few numbers every so many steps, measured on the device."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.monitor import checked_every, corner, row_of
from halfstep_torch.distributed.shards import local_part
from halfstep_torch.moment_probe import PAIRS
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.probe_steps import NARROW, any_optimizer, is_moment, rounded_to_nearest
from halfstep_torch.storage.ends import count_at_ends


class Monitor:
    """Measure every so many steps what rounding loses, of any `torch.optim.Optimizer`, ours or not.

    Call `read` after every step. Every `every`-th call returns the numbers as a flat dict of floats, for W&B,
    TensorBoard, a Trainer or Lightning; others return None, and do nothing. The numbers are computed where
    the arrays are, and 20 bytes are transferred. The step itself is left alone.

    | entry | of the measured step |
    |---|---|
    | `step` | the number of the call |
    | `updates_lost` | share of the updates of 16-bit weights that move nothing |
    | `update_norm` | the norm of what the weights moved |
    | `weight_norm` | the norm of the weights |
    | `moments_at_smallest`, `moments_at_largest` | shares of second moments at the ends of their codes |
    | `nonfinite` | how many weights are infinite or NaN |

    The first two are estimates, from the first 16,384 elements of each weight. An update counts as lost if a
    weight that is rounded to nearest stays where it was, and its moments are not all zero. As `diagnose`, it
    takes the stochastic rounding of other libraries for a loss. Of DTensors this process counts its own part.

    What is wrong is said once in the log `halfstep_torch`, such as second moments at the ends of what
    `one_pass` holds.

    Args:
        optimizer: that trains; one that accelerate has wrapped, too.
        every: how many steps lie between two that are measured.

    Raises:
        TypeError: if `optimizer` is no optimizer.
        ValueError: if `every` is no positive integer.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
        >>> torch.nn.init.ones_(model.weight).grad = torch.ones_like(model.weight)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> monitor = hs.Monitor(optimizer, every=2)
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     row = monitor.read()
        >>> row["step"], row["updates_lost"], row["weight_norm"]
        (2.0, 1.0, 8.0)

    Source: ours.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 100):
        self.every = checked_every(every)
        self._optimizer = any_optimizer("Monitor", optimizer)
        self._calls = 0
        self._before: dict[Tensor, Tensor] = {}

    def read(self) -> dict[str, float] | None:
        """Return the numbers of the step that was taken, at every `every`-th call; None at others."""
        self._calls += 1
        row = None
        if self._before:
            numbers = _measured(self._optimizer, self._before)
            row = row_of("halfstep_torch", self._calls, numbers, next(iter(PAIRS)), _formats(self._optimizer))
            self._before = {}
        if (self._calls + 1) % self.every == 0:
            params = (p for group in self._optimizer.param_groups for p in group["params"])
            self._before = {p: _corner(p).clone() for p in params if p.requires_grad}
        return row


def _corner(p: Tensor) -> Tensor:
    here = local_part(p.detach())
    return here[corner(here.shape)] if here.dim() else here


@torch.no_grad()
def _measured(optimizer: torch.optim.Optimizer, before: dict[Tensor, Tensor]) -> list[float]:
    """Return the numbers of a step, in the order of `NUMBERS`, norms as squares."""
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
    """Return of a weight: updates lost, updates, and squares of what it moved and of it."""
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
    """Yield how many second moments of ours stand at the ends of their codes, and of how many."""
    for second, first, state in _second_moments(optimizer):
        if (ends := count_at_ends(second, first, state)) is not None:
            yield ends, state[second.key].numel()


def _formats(optimizer: torch.optim.Optimizer) -> set[str]:
    return {second.format.dtype for second, _, _ in _second_moments(optimizer)}


def _second_moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Any, dict[str, Tensor]]]:
    """Yield each second moment of ours, the first beside it, and the state of the parameter."""
    for _, param, plan in optimizer.plans() if isinstance(optimizer, Optimizer) else ():
        state = {key: local_part(x) for key, x in optimizer.state.get(param, {}).items()}
        yield from ((second, first, state) for second, first in plan.second_moments if state)
