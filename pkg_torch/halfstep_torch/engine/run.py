"""Running the stages of a batch on its rows: by compiled kernels if there are any, else eagerly."""

from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from halfstep_torch.distributed.norms import SharedNorms
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.rows import Rows
from halfstep_torch.engine.slots import Slot, SlotColumns
from halfstep_torch.engine.step_numbers import number_places, unflat

Walk = Generator[Sequence, None, None]
"""Steps slots in place; yields requests to other processes."""
Leaving = Generator[Sequence, None, Mapping[int, Tensor]]
"""Yields requests to other processes, and returns the updates that parameters leave, by slot."""
StepApart = Callable[[Batch, int, Mapping[int, Tensor]], Leaving]
"""Runs a stage, by its place, on slots that wait for other processes, given the updates that come to it."""


def run_batch(batch: Batch, step_apart: StepApart) -> list[tuple[Walk, Sequence]]:
    """Step the slots of a batch in place; return those that wait for other processes, with their requests."""
    waiting = []
    for places, stage_rows in batch.rows:
        walk = _walk(batch, places, stage_rows, step_apart)
        if (asked := next(walk, None)) is not None:
            waiting.append((walk, asked))
    # Aliases have version counters of their own: autograd must learn that the weights changed.
    torch.autograd.graph.increment_version(batch.owners)
    return waiting


def _walk(batch: Batch, places: Sequence[int], stage_rows: Sequence, step_apart: StepApart) -> Walk:
    arriving = batch.gradients(places)
    for k, (stage, all_rows) in enumerate(zip(batch.plan.padded_stages, stage_rows, strict=True)):
        if stage.scope == "parameter":
            if not k:  # the rule may write into what it is given, and that is the gradient
                arriving = {place: u.to(torch.float32, copy=True) for place, u in arriving.items()}
            arriving = yield from _step_arrays(batch, k, arriving, step_apart)
            continue
        leaving = None if stage.applies else {place: _update_like(batch.slots[place]) for place in places}
        for rows in all_rows:
            rows.load(arriving, leaving)
            step_rows(batch, k, rows)
            rows.write_back(leaving)
        arriving = leaving or {}


def _step_arrays(batch: Batch, k: int, arriving: Mapping[int, Tensor], step_apart: StepApart) -> Leaving:
    """Run the k-th stage on whole parameters; return the outgoing updates."""
    waits = {place: u for place, u in arriving.items() if batch.slots[place].waits}
    leaving = {place: step_array(batch, k, place, u) for place, u in arriving.items() if place not in waits}
    if waits:
        leaving |= yield from step_apart(batch, k, waits)
    return leaving


def _update_like(slot: Slot) -> Tensor:
    return torch.empty(slot.param.shape, dtype=torch.float32, device=slot.param.device)


def step_array(batch: Batch, k: int, place: int, u: Tensor, op: SharedNorms | None = None) -> Tensor:
    """Run the k-th stage on the local part of a parameter, in its shape; return the outgoing update."""
    stage, slot, keys = batch.plan.padded_stages[k], batch.slots[place], batch.host_keys[:, place].tolist()
    numbers = batch.stage_numbers(k)[slot.step]
    state = {name: slot.state[name].reshape(-1) for name in stage.arrays}
    words = stage.array_words(keys, batch.device)
    out, new_state = stage.run(slot.param.detach(), u, state, numbers, words, op)
    if op is not None and op.shares:
        return u
    for name, array in new_state.items():
        slot.state[name].copy_(array.view(slot.state[name].shape))
    if stage.applies:
        slot.param.detach().copy_(out)
    return out.contiguous()


def step_rows(batch: Batch, k: int, rows: Rows) -> None:
    """Run the k-th stage on rows: by its kernel if there is one."""
    numbers, keys, first, column = batch.vectors[k], rows.keys(batch.keys), rows.low, rows.column
    by_row = isinstance(numbers, SlotColumns)
    numbers = rows.entries(numbers) if by_row else numbers
    kernels = batch.kernels[k] if batch.kernels else {}
    if not kernels or keys.dim() > 2:  # past 2^32 elements: too rare to have a kernel
        (by_name, *_) = batch.stage_numbers(k).values()
        if by_row:
            by_name = unflat(number_places(tuple(by_name)), numbers[:, :, None].unbind())
        keys = keys[:, :, None] if keys.dim() == 2 else keys
        rows.stage.step_rows(rows.p, rows.g, rows.u, rows.state, by_name, first[:, None], keys, column)
        return
    single_slot = rows.single_slot and True in kernels
    if single_slot:
        keys, first = keys[:, :1].contiguous(), first[:1]
        numbers = numbers[:, 0].contiguous() if by_row else numbers
    updates = [] if rows.u is None else [rows.u]
    kernels[single_slot](rows.p, rows.g, *updates, *rows.state, numbers, first, keys, column)
