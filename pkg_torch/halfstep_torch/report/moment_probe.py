"""A probe of an optimizer's moments: whether they can shrink, are zero, and have the requested format."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.diagnosis import MomentDiagnosis, MomentTally
from halfstep_torch.checkpoint.float32_state import decoded_states
from halfstep_torch.distributed.collectives import total_counts
from halfstep_torch.distributed.shards import local_part
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.report.description import described
from halfstep_torch.report.probe_steps import NARROW, copy_of, is_moment, second_moments, take_step
from halfstep_torch.storage.ends import count_at_ends
from halfstep_torch.storage.stored_moment import State

PAIRS = {"exp_avg_sq": "exp_avg"}
"""Keys of second moments, and of the first moment beside each."""


def diagnose_moments(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> dict[str, MomentDiagnosis]:
    """Return the diagnosis of named parameters' moments by key, from a step with zero gradients."""
    params = [p for p in names if optimizer.state.get(p)]
    narrow: set[tuple[Tensor, str]] = set()

    def state(p: Tensor, key: str, x: Tensor) -> Tensor:
        if x.dtype not in NARROW or not is_moment(p, key, x):
            return x
        narrow.add((p, key))
        # The next number above 1, where the gap below is the largest relative to the number.
        return torch.full_like(x, 1 + torch.finfo(x.dtype).eps)

    trial, copies = copy_of(optimizer, params, torch.zeros_like, torch.zeros_like, state)
    take_step(trial)
    others, formats = _kept_otherwise(optimizer, params), _formats(optimizer)
    tallies: dict[str, MomentTally] = defaultdict(MomentTally)
    changed = _changed(trial, copies, narrow)
    for i, group in enumerate(optimizer.param_groups):
        for p in (p for p in group["params"] if p in copies):
            kept = optimizer.state[p]
            for key, form in (formats[p] if formats else _dtypes(p, kept)).items():
                if (p, key) in others:
                    tallies[key].otherwise[others[p, key]] += p.numel()
                # A group has one rate.
                tallies[key].add(form, p.numel(), i, changed.get((p, key), True))
    for second_key, first_key in PAIRS.items():
        pairs = [(p, optimizer.state[p].get(first_key), optimizer.state[p].get(second_key)) for p in copies]
        pairs = [x for x in pairs if is_moment(x[0], "", x[1]) and is_moment(x[0], "", x[2])]
        pairs = [x for x in pairs if x[1].is_floating_point()]
        zeros = [((local_part(y) == 0) & (local_part(x) != 0)).sum() for _, x, y in pairs]
        for (zero,) in total_counts([p for p, _, _ in pairs], [(int(count),) for count in zeros]):
            tallies[second_key].zero += zero
    _count_ends(optimizer, {p: names[p] for p in copies}, tallies)
    return {key: tally.diagnosis for key, tally in tallies.items()}


def _changed(
    trial: torch.optim.Optimizer, copies: Mapping[Tensor, Tensor], narrow: set[tuple[Tensor, str]]
) -> dict[tuple[Tensor, str], bool]:
    """Return whether a step changed an element, in any process, of moments just above 1."""
    pairs = [(p, key) for p in copies for key in trial.state[copies[p]] if (p, key) in narrow]
    left = [local_part(trial.state[copies[p]][key]) for p, key in pairs]
    counts = [(int((x != 1 + torch.finfo(x.dtype).eps).sum()),) for x in left]
    totals = total_counts([p for p, _ in pairs], counts)
    return {pair: count > 0 for pair, (count,) in zip(pairs, totals, strict=True)}


def _count_ends(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tallies: Mapping[str, MomentTally]
) -> None:
    """Count the elements of our second moments at the ends of their codes, in all processes."""
    found: list[tuple[Tensor, str, tuple[int, ...]]] = []
    for param, second, first, here in second_moments(optimizer):
        if param in names and (ends := count_at_ends(second, first, here)) is not None:
            found.append((param, second.key, tuple(map(int, ends))))
    totals = total_counts([param for param, _, _ in found], [counts for _, _, counts in found])
    for (param, key, _), (low, high) in zip(found, totals, strict=True):
        tallies[key].add_ends(names[param], low, high, param.numel())


def float32_moments(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, list[Tensor]]:
    """Return the moments by key. Ours are decoded, and others are floating-point arrays."""
    moments: dict[str, list[Tensor]] = defaultdict(list)
    if isinstance(optimizer, Optimizer):
        states = decoded_states(optimizer, {p for p in params if optimizer.state.get(p)})
    else:
        states = {p: optimizer.state.get(p, {}) for p in params}
    for p, state in states.items():
        for key, x in state.items():
            if is_moment(p, key, x) and x.is_floating_point():
                moments[key].append(x)
    return moments


def _formats(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, str]]:
    """Return the format of each of our moments, by parameter and key."""
    if not isinstance(optimizer, Optimizer):
        return {}
    return {
        param: {x.key: (x.again or x).format.text for x in plan.moments}
        for _, param, plan in optimizer.plans()
    }


def _dtypes(p: Tensor, kept: State) -> dict[str, str]:
    return {key: dtype_name(x.dtype) for key, x in kept.items() if is_moment(p, key, x)}


def _kept_otherwise(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[tuple[Tensor, str], str]:
    """Return why moments do not have the requested format, by parameter and key."""
    if isinstance(optimizer, Optimizer):
        rows = ((param, row) for param, kept in described(optimizer) for row in kept)
        return {(param, row.name): row.why for param, row in rows if not row.as_asked}
    trial, copies = copy_of(optimizer, params, torch.clone, torch.clone, None)
    take_step(trial)
    reasons = {}
    for p, fresh in ((p, trial.state[copy]) for p, copy in copies.items()):
        for key, x in optimizer.state[p].items():
            if is_moment(p, key, x) and is_moment(p, key, fresh.get(key)) and fresh[key].dtype != x.dtype:
                reasons[p, key] = (
                    f"it is {dtype_name(x.dtype)}, and {dtype_name(fresh[key].dtype)} where fresh"
                )
    return reasons
