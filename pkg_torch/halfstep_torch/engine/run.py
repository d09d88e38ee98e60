"""Running the stages of a batch, by one call of a kernel or in plain torch."""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.distributed.norms import SharedNorms
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.lazy_step import may_be_lazy, step_lazily
from halfstep_torch.engine.plain import piece_length, step_pieces
from halfstep_torch.engine.scaled_step import ScaledStep, Walk
from halfstep_torch.engine.slots import Slot
from halfstep_torch.numbers.exact import looking_at_numbers

Leaving = Generator[Sequence, None, Mapping[int, Tensor]]
"""Generator of requests to other processes, which returns the outgoing updates by slot."""
StepApart = Callable[[Batch, int, Mapping[int, Tensor]], Leaving]
"""Function that runs a stage, given by place, on slots that wait for other processes, with their updates."""

TOGETHER = 1 << 22
"""Elements with float32 updates kept at the same time between stages."""


def run_batch(
    batch: Batch, step_apart: StepApart, scaled: ScaledStep | None = None
) -> list[tuple[Walk, Sequence]]:
    """Step the slots of a batch in place. Return walks that wait for other processes, with their requests.

    `scaled` has the kernels of a batch in which a rule scales by norms.
    """
    walks, waiting, rest = [], [], range(len(batch.slots))
    if scaled is not None:
        arriving = batch.gradients(rest)
        tables = scaled.tables(batch, arriving)
        walks, rest = [scaled.walk(batch, tables, arriving)] if tables.places else [], tables.rest
    elif batch.run_at_once():
        torch.autograd.graph.increment_version(batch.owners)
        return []
    if len(batch.plan.stages) > 1:
        rest = [place for place in rest if not _is_stepped_lazily(batch, place)]
    for walk in itertools.chain(walks, (_walk(batch, places, step_apart) for places in _groups(batch, rest))):
        if (asked := next(walk, None)) is not None:
            waiting.append((walk, asked))
    # Kernels write to memory by address, so autograd must be told that the weights changed.
    torch.autograd.graph.increment_version(batch.owners)
    return waiting


def _is_stepped_lazily(batch: Batch, place: int) -> bool:
    """Step a long parameter in pieces if its rules allow it. Return whether it was stepped."""
    slot = batch.slots[place]
    if slot.waits or slot.needs_whole or not may_be_lazy(slot.plan, slot.param.shape, slot.param.device):
        return False
    (g,) = batch.gradients([place]).values()
    return slot.is_flat(g) and step_lazily(batch, place, g)


def _groups(batch: Batch, places: Sequence[int]) -> list[list[int]]:
    """Return groups of slots that run through all stages together, by place."""
    if len(batch.plan.stages) == 1:
        return [list(places)] if places else []
    groups, room = [], 0
    for place in places:
        elements = batch.slots[place].param.numel()
        if not groups or elements > room:
            groups.append([])
            room = TOGETHER
        groups[-1].append(place)
        room -= elements
    return groups


def _walk(batch: Batch, places: Sequence[int], step_apart: StepApart) -> Walk:
    arriving = batch.gradients(places)
    for k, stage in enumerate(batch.plan.padded_stages):
        if stage.scope == "parameter":
            if not k:  # the rule may write into its input, which is the gradient
                arriving = {place: u.to(torch.float32, copy=True) for place, u in arriving.items()}
            waits = {place: u for place, u in arriving.items() if batch.slots[place].waits}
            leaving = {}
            for place in [place for place in arriving if place not in waits]:
                # An update is freed when the next replaces it.
                leaving[place] = step_array(batch, k, place, arriving.pop(place))
            if waits:
                leaving |= yield from step_apart(batch, k, waits)
            arriving = leaving
            continue
        leaving = None if stage.applies else {place: _update_like(batch.slots[place]) for place in places}
        rest = places
        if (kernel := batch.kernels[k] if batch.kernels else None) is not None:
            rows, rest = batch.by_memory(k, places, arriving)
            if rows:
                late = batch.late_numbers(k)
                keys, numbers, which = batch.inputs(k, rows, late)
                out = None if leaving is None else _addresses(rows, leaving)
                table = batch.table(k, rows, _addresses(rows, arriving), out)
                kernel(table, keys, numbers, which, late=late)
        short = [place for place in rest if _is_short(batch.slots[place], k, arriving[place])]
        for together in _alike(batch, k, short):
            _step_packed(batch, k, together, arriving, leaving)
        for place in set(rest) - set(short) if short else rest:
            _step_plainly(batch, k, place, arriving[place], None if leaving is None else leaving[place])
        arriving = leaving or {}


def _addresses(places: Sequence[int], arrays: Mapping[int, Tensor]) -> np.ndarray:
    """Return the addresses of slots' arrays, given by place."""
    return np.array([arrays[i].data_ptr() for i in places], np.int64)


def _is_short(slot: Slot, k: int, g: Tensor) -> bool:
    """Whether copying a parameter with whole blocks next to others costs less than a separate step."""
    short = slot.param.numel() <= piece_length(slot.param.device) // 4
    return short and slot.is_flat(g) and all(x.run is None for x in slot.plan.stages[k].blocks)


def _alike(batch: Batch, k: int, places: Sequence[int]) -> list[list[int]]:
    """Return places of slots with equal stages and counts, at most a piece of elements together."""
    alike: dict[tuple, list[list[int]]] = {}
    filled: dict[tuple, int] = {}
    for place in places:
        slot = batch.slots[place]
        key, elements = (slot.plan.stages[k], batch.steps[place]), slot.param.numel()
        if key not in alike or filled[key] + elements > piece_length(slot.param.device):
            alike.setdefault(key, []).append([])
            filled[key] = 0
        alike[key][-1].append(place)
        filled[key] += elements
    return [together for of_key in alike.values() for together in of_key]


def _step_packed(
    batch: Batch,
    k: int,
    places: Sequence[int],
    arriving: Mapping[int, Tensor],
    leaving: Mapping[int, Tensor] | None,
) -> None:
    """Step short parameters end to end, in plain torch."""
    slots = [batch.slots[place] for place in places]
    sizes = [slot.param.numel() for slot in slots]
    params = [slot.param.detach().view(-1) for slot in slots]
    p, g = torch.cat(params), torch.cat([arriving[place].reshape(-1) for place in places])
    u = None if leaving is None else torch.empty(len(p), dtype=torch.float32, device=p.device)
    stage, numbers = slots[0].plan.stages[k], batch.stage_numbers(k)[batch.steps[places[0]]]
    arrays = {name: [slot.state[name].view(-1) for slot in slots] for name in stage.arrays}
    state = {name: torch.cat(parts).to(p.device) for name, parts in arrays.items()}
    of_slots = torch.from_numpy(batch.host_keys[:, places])
    keys = of_slots.repeat_interleave(torch.tensor(sizes, device="cpu"), 1).to(p.device)
    at = torch.cat([slot.indices(0, size) for slot, size in zip(slots, sizes, strict=True)])
    step_pieces(stage, p, g, u, state, numbers, keys.unbind(), lambda i, j: at[i:j])
    pairs = [(params, p)]
    if u is not None and leaving is not None:
        pairs = [([leaving[place].view(-1) for place in places], u)]
    for parts, packed in [*pairs, *((arrays[name], x) for name, x in state.items())]:
        torch.split_with_sizes_copy(packed, [x.numel() for x in parts], out=parts)


def _step_plainly(batch: Batch, k: int, place: int, g: Tensor, u: Tensor | None) -> None:
    slot = batch.slots[place]
    param = slot.param.detach()
    p = param if param.is_contiguous() else param.contiguous()
    if g.device != p.device:
        g = g.to(p.device)
    numbers, keys = batch.stage_numbers(k)[batch.steps[place]], batch.host_keys[:, place].tolist()
    step_pieces(slot.plan.stages[k], p, g, u, slot.state, numbers, keys, slot.indices)
    if p is not param:
        param.copy_(p)


def _update_like(slot: Slot) -> Tensor:
    return torch.empty(slot.param.shape, dtype=torch.float32, device=slot.param.device)


@looking_at_numbers()
def step_array(batch: Batch, k: int, place: int, u: Tensor, op: SharedNorms | None = None) -> Tensor:
    """Run the k-th stage on the local part of a parameter, in its shape, and return the update."""
    stage, slot, keys = batch.plan.padded_stages[k], batch.slots[place], batch.host_keys[:, place].tolist()
    numbers = batch.stage_numbers(k)[batch.steps[place]]
    state = {name: slot.state[name].reshape(-1).to(batch.device) for name in stage.arrays}
    words = stage.array_words(keys, batch.device)
    out, new_state = stage.run(slot.param.detach(), u, state, numbers, words, op)
    if op is not None and op.shares:
        return u
    for name, array in new_state.items():
        slot.state[name].copy_(array.view(slot.state[name].shape))
    if stage.applies:
        slot.param.detach().copy_(out)
    return out.contiguous()
