"""What 16 bits cost a run: updates and decay that rounding drops, moments that freeze, norms that are wrong.

Nothing here knows how an optimizer works. Copies of it take a step: as it is, with float32 weights, with
gradients of zero. What they leave where it was is what would be lost.
"""

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.gradients.hooks import named_leaves
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.global_norm import global_norm
from halfstep_torch.trial_steps import (
    NARROW,
    copy_of,
    is_moment,
    rounded_to_nearest,
    take_step,
    weights_after_decay,
    weights_after_step,
)

_FUNCTION = "diagnose"


@dataclasses.dataclass(frozen=True)
class MomentDiagnosis:
    """How one kind of moment fares.

    Attributes:
        dtypes: how many elements are kept in each dtype.
        frozen: share of them that cannot shrink: one step without a gradient takes nothing off them. (Of
            codes with scales nothing is said.)
        zero: of a second moment, the share that is zero where the first one is not.
    """

    dtypes: dict[str, int]
    frozen: float
    zero: float = 0.0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` returns; `print` shows it as a table.

    Attributes:
        updates_lost: share of the updates of 16-bit weights that are not zero and move nothing; 0 where they
            are rounded stochastically, or what is lost is kept.
        decay_lost: the same of weight decay alone; None where there is none.
        leaves: `updates_lost` of each 16-bit parameter, by name.
        moments: of every kind of moment, by its key in the state.
        norm: of all gradients, in float32, and
        plain_norm: as the framework's own clipping has it.
        advice: a line for each thing found; none where all is well.
    """

    updates_lost: float
    decay_lost: float | None
    leaves: dict[str, float]
    moments: dict[str, MomentDiagnosis]
    norm: float
    plain_norm: float
    advice: tuple[str, ...]

    def __str__(self) -> str:
        decay = "none" if self.decay_lost is None else f"{self.decay_lost:.1%}"
        rows = [("updates lost", f"{self.updates_lost:.1%}"), ("decay lost", decay)]
        rows += [(f"  {name}", f"{lost:.1%}") for name, lost in _worst(self.leaves)]
        for key, one in self.moments.items():
            kinds = ", ".join(one.dtypes)
            rows.append((key, f"{kinds}; frozen {one.frozen:.1%}; zero {one.zero:.1%}"))
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
        moments = _moments(optimizer, listed)
    grads = [p.grad.detach() for p in listed if p.grad is not None]
    norm, plain = float(global_norm(grads)), float(torch.nn.utils.get_total_norm(grads))
    leaves = {names.get(id(p), str(i)): _share([counts[p]]) for i, p in enumerate(narrow)}
    found = (_share(counts.values()), decay_lost, leaves, moments, norm, plain)
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
    if abs(plain_norm - norm) > 0.01 * norm:
        lines.append(
            f"The norm of the gradients is {norm:.4g}; torch's own clipping takes it for {plain_norm:.4g}. "
            "Use clip_grad_norm_ of halfstep_torch."
        )
    return tuple(lines)


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


def _moments(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, MomentDiagnosis]:
    """Return how the moments fare, by key: rates show in what a step without a gradient leaves of them."""
    params = [p for p in params if optimizer.state.get(p)]
    asked: set[tuple[Tensor, str]] = set()

    def state(p: Tensor, key: str, x: Tensor) -> Tensor:
        if x.dtype not in NARROW or not is_moment(p, key, x):
            return x
        asked.add((p, key))
        # The next number above 1: there the gap below is the largest share of the number.
        return torch.full_like(x, 1 + torch.finfo(x.dtype).eps)

    alone, copies = copy_of(optimizer, params, torch.zeros_like, torch.zeros_like, state)
    take_step(alone)
    fates: dict[str, _Fate] = defaultdict(_Fate)
    for i, group in enumerate(optimizer.param_groups):
        for p in (p for p in group["params"] if p in copies):
            kept, left = optimizer.state[p], alone.state[copies[p]]
            for key, x in kept.items():
                if not is_moment(p, key, x):
                    continue
                fates[key].dtypes[dtype_name(x.dtype)] += x.numel()
                if (p, key) in asked:
                    shrinks = bool((left[key] != 1 + torch.finfo(x.dtype).eps).any())
                    fates[key].note(i, x.numel(), shrinks)
            first, second = kept.get("exp_avg"), kept.get("exp_avg_sq")
            if is_moment(p, "", first) and is_moment(p, "", second) and first.is_floating_point():
                fates["exp_avg_sq"].zero += int(((second == 0) & (first != 0)).sum())
    return {key: fate.diagnosis for key, fate in fates.items()}


class _Fate:
    """What is known of one kind of moment."""

    def __init__(self):
        self.dtypes: dict[str, int] = defaultdict(int)
        self.zero = 0
        # A group has one rate. Of few elements that are rounded stochastically, none may happen to shrink.
        self._sizes: dict[int, int] = defaultdict(int)
        self._shrinks: dict[int, bool] = defaultdict(bool)

    def note(self, group: int, size: int, shrinks: bool) -> None:
        """Note of an array of a group whether any element has shrunk."""
        self._sizes[group] += size
        self._shrinks[group] |= shrinks

    @property
    def diagnosis(self) -> MomentDiagnosis:
        """What is told of it."""
        total = max(sum(self.dtypes.values()), 1)
        frozen = sum(size for group, size in self._sizes.items() if not self._shrinks[group])
        return MomentDiagnosis(dict(self.dtypes), frozen / total, self.zero / total)
