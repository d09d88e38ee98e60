"""Running the stages of a batch on its rows: by compiled kernels where there are any, else eagerly."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.rows import Rows
from halfstep_torch.engine.slots import Slot, SlotColumns
from halfstep_torch.engine.step_numbers import number_places, unflat

Leaving = Generator[Any, None, Mapping[int, Tensor]]
"""Yields requests to other processes, and returns the updates that parameters leave, by slot."""


def run_batch(batch: Batch) -> None:
    """Step the slots of a batch in place."""
    for walk in walks(batch, _step_arrays):
        for _ in walk:
            raise AssertionError("a parameter that is whole here waits for nothing")


def walks(batch: Batch, step_arrays: Callable[..., Leaving]) -> Iterator[Iterator[Any]]:
    """Yield what steps each group of slots through all stages, in place; it yields what it waits for.

    `step_arrays` runs rules that see whole parameters.
    """
    steps = [row_step(batch, k) for k in range(len(batch.plan.padded_stages))]
    for places, stage_rows in batch.row_plan.groups:
        yield _walk(batch, places, steps, stage_rows, step_arrays)
    # Aliases have version counters of their own: autograd must learn that the weights changed.
    torch.autograd.graph.increment_version([slot.owner for slot in batch.slots])


def _walk(
    batch: Batch, places: Sequence[int], steps: Sequence, stage_rows: Sequence, step_arrays: Callable
) -> Iterator[Any]:
    arriving = batch.gradients(places)
    stages = batch.plan.padded_stages
    for k, (stage, step, all_rows) in enumerate(zip(stages, steps, stage_rows, strict=True)):
        if stage.scope == "parameter":
            if not k:  # the rule may write into what it is given, and that is the gradient
                arriving = {place: u.to(torch.float32, copy=True) for place, u in arriving.items()}
            arriving = yield from step_arrays(batch, k, arriving)
            continue
        leaving = None if stage.lands else {place: _update_like(batch.slots[place]) for place in places}
        for rows in all_rows:
            rows.load(arriving, leaving)
            step(rows)
            rows.write_back(leaving)
        arriving = leaving or {}


def _step_arrays(batch: Batch, k: int, arriving: Mapping[int, Tensor]) -> Leaving:
    """Run the k-th stage on parameters, each in its shape; return the updates that it leaves."""
    yield from ()
    return {place: step_array(batch, k, place, u) for place, u in arriving.items()}


def _update_like(slot: Slot) -> Tensor:
    return torch.empty(slot.param.shape, dtype=torch.float32, device=slot.param.device)


def step_array(batch: Batch, k: int, place: int, u: Tensor, op: Any = None) -> Tensor:
    """Run the k-th stage on what is here of a parameter, in its shape; return the update that it leaves."""
    stage, slot, keys = batch.plan.padded_stages[k], batch.slots[place], batch.keys.columns[:, place].tolist()
    numbers = batch.stage_numbers(k)[slot.step]
    state = {name: slot.state[name].reshape(-1) for name in stage.arrays}
    words = stage.array_words(keys, batch.device)
    out, new_state = stage.run(slot.param.detach(), u, state, numbers, words, op)
    if op is not None and op.shares:
        return u
    for name, array in new_state.items():
        slot.state[name].copy_(array.view(slot.state[name].shape))
    if stage.lands:
        slot.param.detach().copy_(out)
    return out.contiguous()


def row_step(batch: Batch, k: int) -> Callable[[Rows], None]:
    """Return what steps rows of the k-th stage."""
    stage, device = batch.plan.padded_stages[k], batch.device
    column, of_counts = stage.column(device), batch.stage_numbers(k)
    vectors = _as_tensor(batch.stage_vectors(k))
    columns_of_numbers = _number_columns(batch, vectors)

    def eager(rows: Rows) -> None:
        keys = rows.keys(batch.keys)
        columns = keys[:, :, None] if keys.dim() == 2 else keys
        (numbers, *_) = of_counts.values()
        if columns_of_numbers:
            places = number_places(tuple(numbers))
            numbers = unflat(places, rows.entries(columns_of_numbers)[:, :, None].unbind())
        stage.step_rows(rows.p, rows.g, rows.u, rows.state, numbers, rows.low[:, None], columns, column)

    kernels = batch.kernels[k] if batch.kernels else {}
    if not kernels:
        return eager
    vector = vectors[0].to(device)

    def compiled(rows: Rows) -> None:
        alone = rows.alone and True in kernels
        keys, first = rows.keys(batch.keys), rows.low
        numbers = rows.entries(columns_of_numbers) if columns_of_numbers else vector
        if keys.dim() > 2:
            eager(rows)  # too rare to have a kernel
            return
        if alone:
            keys, first = keys[:, :1].contiguous(), first[:1]
            numbers = numbers[:, 0].contiguous() if columns_of_numbers else numbers
        updates = [] if rows.u is None else [rows.u]
        kernels[alone](rows.p, rows.g, *updates, *rows.state, numbers, first, keys, column)

    return compiled


def _number_columns(batch: Batch, vectors: Tensor) -> SlotColumns | None:
    """Return the numbers of every slot of a batch, of many counts; None where there is one count."""
    if len(vectors) == 1:
        return None
    counts = {step: i for i, step in enumerate(batch.numbers)}
    of_slots = torch.from_numpy(np.array([counts[slot.step] for slot in batch.slots]))
    return SlotColumns(vectors[of_slots].T.contiguous().to(batch.device))


def _as_tensor(rows: list[list[float]]) -> Tensor:
    """Return rows of numbers of float32, which a user's own rule may give as tensors."""
    if any(isinstance(x, Tensor) for x in rows[0]):
        return torch.tensor(rows, dtype=torch.float32, device="cpu")
    return torch.from_numpy(np.array(rows, np.float32))  # many times faster
