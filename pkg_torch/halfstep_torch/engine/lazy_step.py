"""Steps of a long parameter in pieces, for rules with means of the whole parameter such as Adafactor's.

Every mean computes the updates before it again, and so does the last stage, so no update is kept.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.c_driver import FIELDS
from halfstep.moments import Moments
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.kernels.kernel import Kernel
from halfstep_torch.engine.lazy_arrays import LazyArray, LazyOp, NotLazy, lazily, piece_length
from halfstep_torch.engine.plain import step_pieces
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.stage import Stage
from halfstep_torch.links.bound_rule import StepMoment
from halfstep_torch.numbers.op import tensor_numbers
from halfstep_torch.storage.stored_moment import Arrays

PIECES = 8
"""Least number of pieces. A shorter parameter is stepped as a whole."""


def may_be_lazy(plan: Plan, shape: torch.Size, device: torch.device) -> bool:
    """Whether the rules of a parameter may run in pieces, as `step_lazily` then finds out."""
    *others, last = plan.stages
    size, length = shape.numel(), piece_length(device)
    return (
        size > PIECES * length
        and size <= shape[0] * length * 2  # a piece has whole rows
        and last.scope == "elementwise"
        and any(stage.scope == "parameter" for stage in others)
        and not any(any(stage.wrapped) for stage in plan.stages)
        and all(map(_keeps_little, others))
    )


def lazy_bytes(size: int, device: torch.device) -> int:
    """Return the approximate bytes of a step in pieces, a piece for each level of a sum and six more."""
    length = piece_length(device)
    return 4 * length * ((size // length).bit_length() + 6)


def _keeps_little(stage: Stage) -> bool:
    """Whether an elementwise stage keeps nothing. For other rules a step finds out."""
    if stage.scope == "elementwise":
        return not stage.arrays and not any(stage.sources)
    return not any(rule.weight_dtype for rule in stage.rules)


def step_lazily(batch: Batch, place: int, g: Tensor) -> bool:
    """Step a parameter in place, or return False without a change if a rule needs it as a whole."""
    slot, p = batch.slots[place], batch.slots[place].param.detach()
    keys, step = batch.host_keys[:, place].tolist(), batch.steps[place]
    *others, last = batch.plan.padded_stages
    numbers = [batch.stage_numbers(k)[step] for k in range(len(others))]
    try:
        u, arrays = lazy_update(others, p, g, slot.state, numbers, keys)
    except NotLazy:
        slot.needs_whole = True
        return False
    for name, array in arrays.items():
        slot.state[name].copy_(array.view(slot.state[name].shape))
    kernel = batch.kernels[-1] if batch.kernels else None
    if kernel is not None and kernel.on_device is None and not last.blocks:
        _apply_by_kernel(batch, place, kernel, u)
        return True
    # Any: for a type checker, an object in place of a tensor is not one.
    of_last: Any = batch.stage_numbers(len(others))[step]
    whole: Any = u  # read in pieces, as a tensor
    step_pieces(slot.plan.stages[-1], p, whole, None, slot.state, of_last, keys, slot.indices)
    return True


def lazy_update(
    stages: Sequence[Stage],
    p: Tensor,
    g: Tensor,
    state: Arrays,
    numbers: Sequence[Sequence[Values]],
    keys: Sequence[int],
) -> tuple[LazyArray, Arrays]:
    """Return the update that leaves the last of some stages, and their new state arrays.

    Raises:
        NotLazy: if a rule needs a whole array at once.
    """
    u = LazyArray(p.shape, p.device, lambda start, stop: g[start:stop].to(torch.float32))
    p32 = LazyArray(p.shape, p.device, lambda start, stop: p[start:stop].to(torch.float32))
    arrays: dict[str, Tensor] = {}
    try:
        for stage, of_stage in zip(stages, numbers, strict=True):
            u, new = _updated(stage, p32, -u if stage.negates else u, state, of_stage, keys)
            arrays |= new
    except Exception as error:  # from an operation that lazy arrays do not support
        raise NotLazy(str(error)) from error
    return u, arrays


def _apply_by_kernel(batch: Batch, place: int, kernel: Kernel, u: LazyArray) -> None:
    """Run the last stage on each piece of an update."""
    slot, last = batch.slots[place], len(batch.plan.stages) - 1
    keys, numbers, which = batch.inputs(last, [place], None)
    p, length = slot.param.detach().view(-1), piece_length(u.device)
    state = [slot.state[name].view(-1) for name in batch.plan.stages[-1].arrays]
    for start in range(0, len(p), length):
        piece = slice(start, min(start + length, len(p)))
        here = [p[piece], u[piece].contiguous(), *(x[piece] for x in state)]
        fields = {"elements": len(here[0]), "run": 0, "first": start, "window_run": len(p), "window_skip": 0}
        row = [*(fields[name] for name in FIELDS), *(x.data_ptr() for x in here)]
        kernel(np.array([row], np.int64), keys, numbers, which)


def _updated(
    stage: Stage,
    p: LazyArray,
    u: LazyArray,
    state: Arrays,
    numbers: Sequence[Values],
    keys: Sequence[int],
) -> tuple[LazyArray, Arrays]:
    """Return the update that leaves a stage, and its new state arrays."""
    words, arrays = stage.array_words(keys, u.device), {}
    for rule, sources, n in zip(stage.rules, stage.sources, numbers, strict=True):
        if rule.scope == "elementwise":
            u = lazily(lambda g, q, rule=rule, n=n: rule.update(g, q, {}, n, ())[0], u, p)
            continue
        of_rule = {name: state[name].reshape(-1).to(u.device) for name in rule.arrays}
        if any(8 * x.numel() > math.prod(p.shape) for x in of_rule.values()):
            raise NotLazy("state as long as the parameter")
        n = tensor_numbers(n, u.device) if rule.tensor_numbers else n
        moments = rule.step_moments(of_rule, [words(*x) for x in sources], tuple(p.shape), n)
        # Any: as in `step_lazily`.
        lazy: Any = {name: _LazyMoment(moment) for name, moment in moments.items()}
        # Any: a rule returns the type of its operations.
        made: Any = rule.rule.update(u, p, n, Moments(rule.rule.name, lazy), LazyOp())
        if not isinstance(made, LazyArray) or made.shape != p.shape:
            raise NotLazy("an update that is no function of arrays")
        u = made
        arrays |= {key: array for moment in moments.values() for key, array in moment.arrays.items()}
    return u, arrays


class _LazyMoment:
    """A moment of a rule on lazy arrays, which is small itself."""

    def __init__(self, moment: StepMoment) -> None:
        self._moment = moment
        self.value = _known(moment.value)

    def round(self, x: LazyArray) -> LazyArray:
        """Round x for the new state."""
        if x.known is None:
            raise NotLazy("a moment of a whole array")
        return _known(self._moment.round(x.known))


def _known(x: Tensor) -> LazyArray:
    return LazyArray(x.shape, x.device, torch.clone, known=x)
