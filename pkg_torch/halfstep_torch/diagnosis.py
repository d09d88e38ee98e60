"""What 16 bits cost a run: updates and decay that rounding drops, moments that freeze, norms that are wrong.

Nothing here knows how an optimizer works. Copies of it take a step: as it is, with float32 weights, with
gradients of zero. What they leave where it was is what would be lost.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.gradients.hooks import named_leaves, taken_by
from halfstep_torch.moment_trials import MomentDiagnosis, diagnose_moments
from halfstep_torch.numbers.global_norm import global_norm
from halfstep_torch.trial_steps import (
    NARROW,
    rounded_to_nearest,
    weights_after_decay,
    weights_after_step,
)

_FUNCTION = "diagnose"
# Writes to a gradient from which it is a sum: unscaling and clipping are two.
_WRITES = 3


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` returns; `print` shows it as a table.

    Attributes:
        updates_lost: share of the updates of 16-bit weights that are not zero and move nothing; 0 where they
            are rounded stochastically, or what is lost is kept.
        decay_lost: the same of weight decay alone; None where there is none.
        leaves: `updates_lost` of each 16-bit parameter, by name.
        moments: of every kind of moment, by its key in the state.
        sums_rounded: share of the gradients that are sums, every summand of which was added in 16 bits and
            rounded to nearest.
        norm: of all gradients, in float32, and
        plain_norm: as the framework's own clipping has it.
        advice: a line for each thing found; none where all is well.
    """

    updates_lost: float
    decay_lost: float | None
    leaves: dict[str, float]
    moments: dict[str, MomentDiagnosis]
    sums_rounded: float
    norm: float
    plain_norm: float
    advice: tuple[str, ...]

    def __str__(self) -> str:
        decay = "none" if self.decay_lost is None else f"{self.decay_lost:.1%}"
        rows = [("updates lost", f"{self.updates_lost:.1%}"), ("decay lost", decay)]
        rows += [(f"  {name}", f"{lost:.1%}") for name, lost in _worst(self.leaves)]
        rows += [(key, str(one)) for key, one in self.moments.items()]
        rows.append(("sums of gradients", f"rounded to nearest {self.sums_rounded:.1%}"))
        rows.append(("norm of gradients", f"{self.norm:.6g} (as clipping has it: {self.plain_norm:.6g})"))
        width = max(len(name) for name, _ in rows)
        table = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*table, *(f"- {line}" for line in self.advice or ("Nothing is lost.",))])


def diagnose(params: torch.nn.Module | Iterable, optimizer: torch.optim.Optimizer) -> Diagnosis:
    """Say what rounding would lose in the next step of any `torch.optim.Optimizer`, of this package or not.

    Call it after backward (under a GradScaler after `unscale_`), before the step, best after some steps of
    training. Copies of the 16-bit
    parameters take steps, the optimizer's own ones with the same numbers: as they are; with weights (and, of
    other packages, state) in float32; and with gradients of zero, from which decay and the rates of moments
    show. Weights, state, gradients and random generators stay as they are; at the peak there are two copies
    more of weights, gradients and state.

    An update counts as lost if the float32 step moves a weight and the step itself does not. Stochastic
    rounding moves few weights too, but by the right amount on average, and an optimizer that keeps what
    rounding loses adds it later: their updates are not lost. Float32 parameters lose nothing.

    Args:
        params: the model, `model.named_parameters()` or parameters, for the names.
        optimizer: that is to step them.

    Returns:
        A `Diagnosis`; `print` shows it.

    Raises:
        TypeError: if it is no optimizer, or one whose step needs a closure.
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
    names = {id(param): name for name, param in named_leaves(_FUNCTION, params)}
    listed = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not listed:
        raise ValueError(f"{_FUNCTION}: no parameter has a gradient. Call it after backward, before step.")
    narrow = [p for p in listed if p.dtype in NARROW]
    with torch.random.fork_rng(devices={p.device for p in listed if p.device.type == "cuda"}):
        lossy = rounded_to_nearest(optimizer, narrow)
        counts = {p: (0, p.numel()) for p in narrow} | _lost(
            lossy, *(weights_after_step(optimizer, lossy, wide) for wide in (True, False))
        )
        decay_lost = _decay_lost(optimizer, lossy)
        moments = diagnose_moments(optimizer, listed)
    grads = [p.grad.detach() for p in listed if p.grad is not None]
    norm, plain = float(global_norm(grads)), float(torch.nn.utils.get_total_norm(grads))
    leaves = {names.get(id(p), str(i)): _share([counts[p]]) for i, p in enumerate(narrow)}
    found = (_share(counts.values()), decay_lost, leaves, moments, _sums_rounded(listed), norm, plain)
    return Diagnosis(*found, advice=_advice(*found))


def _checked(optimizer: Any) -> torch.optim.Optimizer:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # as accelerate wraps one
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{_FUNCTION}: optimizer is {type(optimizer).__name__}. Pass a torch.optim.Optimizer."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{_FUNCTION}: {type(optimizer).__name__}.step needs a closure, which is not called here."
        )
    return optimizer


def _worst(leaves: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the five leaves that lose most."""
    return sorted(((name, lost) for name, lost in leaves.items() if lost), key=lambda one: -one[1])[:5]


def _advice(
    updates_lost: float,
    decay_lost: float | None,
    leaves: Mapping[str, float],
    moments: Mapping[str, MomentDiagnosis],
    sums_rounded: float,
    norm: float,
    plain_norm: float,
) -> tuple[str, ...]:
    """Return a line for each thing found."""
    lines = []
    if updates_lost > 0.05 or (decay_lost or 0) > 0.05:
        decay = f" and {decay_lost:.0%} of the decay" if decay_lost else ""
        lines.append(
            f"Rounding drops {updates_lost:.0%} of the updates{decay}. Use an optimizer of halfstep_torch, "
            "which rounds stochastically. A learning rate that was tuned while weights stood still is too "
            "high without that: try a lower one."
        )
    for key, one in moments.items():
        if one.frozen > 0.05:
            lines.append(
                f"{one.frozen:.0%} of {key} cannot shrink: 1 - beta is below half a gap of its dtype. Keep "
                "it in float32, or round it stochastically, as halfstep_torch does."
            )
        if one.zero > 0.01:
            lines.append(
                f"{one.zero:.0%} of {key} is zero where exp_avg is not: such weights move by exp_avg / eps. "
                "Keep it in a dtype with the range of float32, such as bfloat16."
            )
        if one.not_as_asked > 0.05:
            lines.append(
                f"{one.not_as_asked:.0%} of {key} is not kept as was asked for: {one.why}. "
                "Change what was asked for, or make the state anew."
            )
    if sums_rounded > 0.05:
        lines.append(
            f"{sums_rounded:.0%} of the gradients were written to {_WRITES} times or more, and rounded to 16 "
            "bits each time: sums of micro-batches lose what is small beside them. Use accumulate_gradients."
        )
    if abs(plain_norm - norm) > 0.01 * norm:
        lines.append(
            f"The norm of the gradients is {norm:.4g}; torch's own clipping takes it for {plain_norm:.4g}. "
            "Use clip_grad_norm_ of halfstep_torch."
        )
    return tuple(lines)


def _sums_rounded(params: list[Tensor]) -> float:
    """Return the share of gradients that were added up in 16 bits; in one process, where that shows."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 0.0  # wrappers write to gradients to bring them to other processes
    grads = [(p, p.grad) for p in params if p.grad is not None]
    # Autograd, and whatever changes a gradient in place, counts that in its version.
    plain = [g for p, g in grads if g.dtype in NARROW and taken_by(p) != "accumulate_gradients"]
    rounded = sum(g.numel() for g in plain if g._version >= _WRITES)
    return rounded / max(sum(g.numel() for _, g in grads), 1)


Count = tuple[int, int]


def _lost(
    params: list[Tensor], due: Mapping[Tensor, Tensor], real: Mapping[Tensor, Tensor]
) -> dict[Tensor, Count]:
    """Return how many weights stay where they are, of how many that float32 would move."""
    counts = {}
    for p in params:
        moves = due[p] != p.detach().to(torch.float32)
        counts[p] = int((moves & (real[p] == p.detach())).sum()), int(moves.sum())
    return counts


def _share(counts: Iterable[Count]) -> float:
    """Return which share of what moves is lost."""
    lost, of = zip((0, 0), *counts, strict=True)
    return sum(lost) / max(sum(of), 1)


def _decay_lost(optimizer: torch.optim.Optimizer, lossy: list[Tensor]) -> float | None:
    """Return the share of decay that is lost: of a first step with gradients of zero."""
    decayed = {p for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
    if not decayed:
        return None
    params = [p for p in lossy if p in decayed]
    after = (weights_after_decay(optimizer, params, wide) for wide in (True, False))
    return _share(_lost(params, *after).values())
