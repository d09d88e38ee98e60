"""Losses of a run in 16 bits: updates and decay lost to rounding, frozen moments, and wrong norms.

The diagnosis does not depend on the kind of optimizer. Copies take a step, once unchanged, once with float32
weights, and once with zero gradients. Values that do not change in these steps are counted as lost.
"""

import inspect
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from halfstep.diagnosis import RANGES, Count, Diagnosis, Ends, Wording, diagnosis_of
from halfstep_torch.distributed.collectives import total_counts
from halfstep_torch.distributed.norms import norms_of_shards
from halfstep_torch.distributed.shards import is_sharded, local_part
from halfstep_torch.gradients.hooks import named_leaves, owner_of
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.report.moment_probe import PAIRS, diagnose_moments, float32_moments
from halfstep_torch.report.probe_steps import (
    NARROW,
    any_optimizer,
    compensated,
    rounded_to_nearest,
    weights_after,
)
from halfstep_torch.say_once import say_once
from halfstep_torch.storage.ends import count_outside

_FUNCTION = "diagnose"
# From this number of writes a gradient is a sum. Unscaling and clipping are two writes.
_WRITES = 3
# torch counts writes to a tensor in this attribute, which is private.
_VERSION = "_version"


_TERMS = Wording(
    package="halfstep_torch",
    cure="Use an optimizer of halfstep_torch, which rounds stochastically.",
    rate="beta",
    pairs=PAIRS,
    sums=f"gradients were written to {_WRITES} times or more, and rounded to 16 bits each time",
    plain_norm="torch's own clipping",
    clip="clip_grad_norm_",
)


def diagnose(params: torch.nn.Module | Iterable, optimizer: torch.optim.Optimizer) -> Diagnosis:
    """Report the losses from rounding in the next step of any `torch.optim.Optimizer`.

    Call it after backward (under a GradScaler after `unscale_`), before the step, best after some steps of
    training. If parameters are DTensors, all processes call it together and get counts for the whole model.
    Copies of the 16-bit parameters take trial steps with the optimizer's own numbers. The first is the usual
    step. The second has float32 weights and, for optimizers of other packages, float32 state. The third has
    zero gradients, and shows the decay and the rates of moments. Weights, state, gradients and random
    generators do not change. Peak memory rises by two copies of weights, gradients and state.

    An update is lost if the float32 step moves a weight and the usual step does not. Optimizers that round
    stochastically, or add rounding errors in later steps, are right on average and lose no updates. Float32
    parameters lose none either.

    Args:
        params: the model, `model.named_parameters()` or parameters, for the names.
        optimizer: the optimizer of the parameters.

    Raises:
        TypeError: if it is not an optimizer, or its step needs a closure.
        ValueError: if no parameter has a gradient.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        >>> model(torch.ones(1, 100, dtype=torch.bfloat16)).sum().backward()
        >>> hs.diagnose(model, optimizer).updates_lost > 0.9
        True
        >>> hs.diagnose(model, hs.AdamW(model.named_parameters(), lr=1e-6)).updates_lost
        0.0

    Source: ours.
    """
    optimizer = _checked(optimizer)
    names = {id(param): name.replace("/", ".") for name, param in named_leaves(_FUNCTION, params)}
    listed = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not listed:
        raise ValueError(f"{_FUNCTION}: no parameter has a gradient. Call it after backward, before step.")
    narrow = [p for p in listed if p.dtype in NARROW]
    leaf_names = {p: names.get(id(p), str(i)) for i, p in enumerate(listed)}
    with torch.random.fork_rng(devices={p.device for p in listed if p.device.type == "cuda"}):
        lossy = rounded_to_nearest(optimizer, narrow)
        counts = {p: (0, p.numel()) for p in narrow} | _lost(
            lossy, *(weights_after(optimizer, lossy, wide=wide) for wide in (True, False))
        )
        kept = _lost_by_compensation(optimizer, compensated(optimizer, narrow))
        decay = _decay_lost(optimizer, lossy)
        moments = diagnose_moments(optimizer, leaf_names)
    grads = [_placed_grad(p) for p in listed]
    return diagnosis_of(
        _TERMS,
        updates={leaf_names[p]: counts[p] for p in narrow if p not in kept},
        compensated={leaf_names[p]: counts for p, counts in kept.items()},
        decay=decay,
        moments=moments,
        sums_rounded=_sums_rounded(listed),
        norm=float(norms_of_shards([local_part(g) for g in grads], listed)[0]),
        plain_norm=_plain_norm(grads),
        nonfinite={"weights": _nonfinite(listed), "gradients": _nonfinite(grads)}
        | {key: _nonfinite(arrays) for key, arrays in float32_moments(optimizer, listed).items()},
        largest=max((_largest(g) for g in grads if g.numel()), default=0.0),
        outside=_outside(optimizer, dict(zip(listed, grads, strict=True)), leaf_names),
    )


def _placed_grad(p: Tensor) -> Tensor:
    """Return a gradient in the placements of its weight, also from partial sums."""
    assert p.grad is not None
    grad = p.grad.detach()
    return grad.redistribute(placements=p.placements) if is_sharded(p) and is_sharded(grad) else grad


def _plain_norm(grads: list[Tensor]) -> float:
    """Return the norm by which torch clips. Its function does not mix shards with whole tensors."""
    kinds = [[g for g in grads if is_sharded(g) == sharded] for sharded in (False, True)]
    norms: list[Tensor] = [torch.nn.utils.get_total_norm(of_kind) for of_kind in kinds if of_kind]
    return math.hypot(*(float(x.full_tensor() if is_sharded(x) else x) for x in norms))


def _largest(grad: Tensor) -> float:
    largest = grad.abs().max()
    return float(largest.full_tensor() if is_sharded(largest) else largest)


def _outside(
    optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]
) -> dict[str, dict[str, Ends]]:
    """Return, by format and name, counts of gradients outside the range of their second moment."""
    dtypes = {
        param: moment.format.dtype
        for _, param, plan in (optimizer.plans() if isinstance(optimizer, Optimizer) else ())
        for moment in plan.moments
        if param in grads and moment.format.dtype in RANGES
    }
    here = [count_outside(local_part(grads[p]), dtype).tolist() for p, dtype in dtypes.items()]
    counts = total_counts([grads[p] for p in dtypes], [tuple(row) for row in here])
    outside: dict[str, dict[str, Ends]] = {}
    for (p, dtype), (low, high, size) in zip(dtypes.items(), counts, strict=True):
        outside.setdefault(dtype, {})[names[p]] = (low, high, size)
    return outside


def _nonfinite(arrays: Iterable[Tensor]) -> Count:
    """Return the number of infinities and NaN, and the number of elements."""
    arrays = list(arrays)
    here = [local_part(x.detach()) for x in arrays]
    counts = total_counts(arrays, [(int((~torch.isfinite(x)).sum()), x.numel()) for x in here])
    return sum(count for count, _ in counts), sum(size for _, size in counts)


def _lost_by_compensation(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[Tensor, Count]:
    """Return the number of updates too small for Kahan's sum, under 2^-18 of a weight (P4)."""
    due = weights_after(optimizer, params, wide=True)
    counts = []
    for p in params:
        p32 = local_part(p.detach()).to(torch.float32)
        moved = (local_part(due[p]) - p32).abs()
        counts.append((int(((moved > 0) & (moved < 2.0**-18 * p32.abs())).sum()), int((moved > 0).sum())))
    return _by_param(params, counts)


def _by_param(params: list[Tensor], counts: list[Count]) -> dict[Tensor, Count]:
    """Return the sum of all processes' counts for each parameter."""
    totals = total_counts(params, counts)
    return {p: (lost, of_all) for p, (lost, of_all) in zip(params, totals, strict=True)}


def _checked(optimizer: object) -> torch.optim.Optimizer:
    optimizer = any_optimizer(_FUNCTION, optimizer)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{_FUNCTION}: {type(optimizer).__name__}.step needs a closure, which is not called here."
        )
    return optimizer


def _sums_rounded(params: list[Tensor]) -> float:
    """Return the share of gradients summed in 16 bits, as seen from one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 0.0  # wrappers write to gradients when they reduce them over processes
    grads = [(p, p.grad) for p in params if p.grad is not None]
    if grads and not hasattr(grads[0][1], _VERSION):
        say_once(f"{_FUNCTION}: torch counts no writes to a tensor any more: sums in 16 bits are not seen.")
        return 0.0
    plain = [g for p, g in grads if g.dtype in NARROW and owner_of(p) != "accumulate_gradients"]
    rounded = sum(g.numel() for g in plain if getattr(g, _VERSION) >= _WRITES)
    return rounded / max(sum(g.numel() for _, g in grads), 1)


def _lost(
    params: list[Tensor], due: Mapping[Tensor, Tensor], real: Mapping[Tensor, Tensor]
) -> dict[Tensor, Count]:
    """Return the number of weights that do not move, but would move in float32."""
    counts = []
    for p in params:
        here = local_part(p.detach())
        moves = local_part(due[p]) != here.to(torch.float32)
        counts.append((int((moves & (local_part(real[p]) == here)).sum()), int(moves.sum())))
    return _by_param(params, counts)


def _decay_lost(optimizer: torch.optim.Optimizer, lossy: list[Tensor]) -> list[Count] | None:
    """Return the decay lost in a first step with zero gradients, or None without decay."""
    decayed = {p for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
    if not decayed:
        return None
    params = [p for p in lossy if p in decayed]
    after = (weights_after(optimizer, params, wide=wide, decay=True) for wide in (True, False))
    return list(_lost(params, *after).values())
