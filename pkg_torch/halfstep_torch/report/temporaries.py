"""The temporary memory of a step: whole arrays beside weights, gradients and state.

Kernels and plain steps of elementwise rules need none. A rule on whole parameters needs some, and if it uses
only means, it works in pieces of a constant size.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep_torch.distributed.shards import is_sharded, window_of
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.lazy_arrays import NotLazy
from halfstep_torch.engine.lazy_step import lazy_bytes, lazy_update, may_be_lazy
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.run import TOGETHER
from halfstep_torch.engine.scaling import NotScaling, asked_norms
from halfstep_torch.engine.stage import Stage
from halfstep_torch.optimizer import Optimizer


def temporary_bytes(optimizer: Optimizer) -> int:
    """Return the peak bytes of temporaries in a step on one device, as on a GPU.

    Pieces of long parameters are as long as on the parameter's device. Rules run on tensors without memory,
    so nothing is computed.
    """
    known: dict[tuple, int] = {}
    groups: dict[int, ReadGroup] = {}
    waiting, in_pieces, of_params = 0, 0, []
    for i, name, param in optimizer._named():
        group = groups.setdefault(i, optimizer._group(i))
        plan = group.plan(name, param)
        if not param.requires_grad or _has_kernels(optimizer, plan, group):
            continue
        shape = tuple(param.shape)
        key = i, plan, shape
        if key not in known:
            known[key] = max([0, *_stage_bytes(plan, group, shape)])
            if known[key] and _is_lazy(plan, group, param):
                known[key], in_pieces = 0, max(in_pieces, lazy_bytes(param.numel(), param.device))
        if known[key]:
            of_params.append((param.numel(), known[key]))
            # The update of each shard waits for the updates of all shards.
            waiting += 4 * torch.Size(window_of(param).shape).numel() if is_sharded(param) else 0
    total = sum(size for size, _ in of_params)
    peaks = (made + 4 * max(min(TOGETHER, total) - size, 0) for size, made in of_params)
    return max(in_pieces, waiting + max(peaks, default=0))


def _is_lazy(plan: Plan, group: ReadGroup, param: Tensor) -> bool:
    """Whether a parameter is stepped in pieces."""
    if is_sharded(param) or not may_be_lazy(plan, param.shape, param.device):
        return False
    *others, _ = zip(plan.padded_stages, plan.bounds, strict=True)
    p, state = _without_memory(plan, tuple(param.shape))
    numbers = [[_numbers(plan, group, place) for place in places] for _, places in others]
    stages = [stage for stage, _ in others]
    try:
        lazy_update(stages, p, p, state, numbers, [1] * _count_of_keys(stages[0]))
    except NotLazy:
        return False
    return True


def _without_memory(plan: Plan, shape: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weights and state of a parameter without memory, with state arrays in a row."""
    p = torch.empty(shape, dtype=plan.dtype, device="meta")
    state = {
        name: torch.empty(spec.shape(shape), dtype=spec.dtype, device="meta").reshape(-1)
        for name, spec in plan.arrays.items()
    }
    return p, state


def _count_of_keys(stage: Stage) -> int:
    return sum(1 + len(roles) for roles in stage.roles)


def _has_kernels(optimizer: Optimizer, plan: Plan, group: ReadGroup) -> bool:
    """Whether kernels scale by norms, and keep no update."""
    if optimizer._compile.choice is False or plan.scaling is None:
        return False
    place = plan.scaling.place
    try:
        asked_norms(plan.rules[place], _numbers(plan, group, place))
    except NotScaling:
        return False
    return True


def _numbers(plan: Plan, group: ReadGroup, place: int) -> tuple:
    j = plan.rule_indices[place]
    return group.links[j].step_numbers(group.values[j], 1)


def _stage_bytes(plan: Plan, group: ReadGroup, shape: tuple[int, ...]) -> list[int]:
    """Return the peak bytes, including the update, in each stage with whole parameters."""
    made = []
    for stage, places in zip(plan.stages, plan.bounds, strict=True):
        if stage.scope != "parameter":
            continue
        p, state = _without_memory(plan, shape)
        numbers = [_numbers(plan, group, place) for place in places]
        words = stage.array_words([1] * _count_of_keys(stage), p.device)
        with _Living() as living:
            u = torch.empty(shape, dtype=torch.float32, device="meta")
            left = stage.run(p, u, state, numbers, words)
        del left
        made.append(living.most)
    return made


class _Living(TorchFunctionMode):
    """A counter of the bytes of storages that exist at the same time.

    Attributes:
        most: the peak bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Run a function, and note the memory of its results."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if (key := id(storage)) not in self._known:
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            self._known[key] = weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._now -= nbytes
        del self._known[key]
