"""Running the stages of a batch on its rows: by compiled kernels where there are any, else eagerly."""

from collections.abc import Callable

import torch
from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.rows import Rows, Slot
from halfstep_torch.engine.step_numbers import flat


def run_batch(batch: Batch) -> None:
    """Step the slots of a batch in place."""
    stages = batch.plan.padded_stages
    steps = [_row_step(batch, k) for k in range(len(stages))]
    for places, stage_rows in batch.row_plan.groups:
        arriving = {place: batch.slots[place].grad for place in places}
        for k, (stage, step, all_rows) in enumerate(zip(stages, steps, stage_rows, strict=True)):
            if stage.scope == "parameter":
                arriving = {place: _step_array(batch, k, place, u) for place, u in arriving.items()}
                continue
            leaving = None if stage.lands else {place: _update_like(batch.slots[place]) for place in places}
            for rows in all_rows:
                rows.load(arriving, leaving)
                step(rows)
                rows.write_back(leaving)
            arriving = leaving or {}
    # Aliases have version counters of their own: autograd must learn that the weights changed.
    torch.autograd.graph.increment_version([slot.param for slot in batch.slots])


def _update_like(slot: Slot) -> Tensor:
    return torch.empty(slot.param.shape, dtype=torch.float32, device=slot.param.device)


def _step_array(batch: Batch, k: int, place: int, u: Tensor) -> Tensor:
    """Run the k-th stage on a full parameter, in its shape; return the update that it leaves."""
    stage, slot, keys = batch.plan.padded_stages[k], batch.slots[place], batch.keys.columns[:, place].tolist()
    state = {name: slot.state[name].view(-1) for name in stage.arrays}
    if not k:  # the rule may write into what it is given, and that is the gradient
        u = u.to(torch.float32, copy=True)
    words = stage.array_words(keys, batch.device)
    out, new_state = stage.run(slot.param.detach(), u, state, batch.stage_numbers(k), words)
    for name, array in new_state.items():
        state[name].copy_(array.view(-1))
    if stage.lands:
        slot.param.detach().copy_(out)
    return out.contiguous()


def _row_step(batch: Batch, k: int) -> Callable[[Rows], None]:
    """Return what steps rows of the k-th stage."""
    stage, numbers, device = batch.plan.padded_stages[k], batch.stage_numbers(k), batch.device
    column = stage.column(device)

    def eager(rows: Rows) -> None:
        keys = rows.keys(batch.keys)
        columns = keys[:, :, None] if keys.dim() == 2 else keys
        stage.step_rows(rows.p, rows.g, rows.u, rows.state, numbers, rows.low[:, None], columns, column)

    kernel = batch.kernels[k] if batch.kernels else None
    if kernel is None:
        return eager
    vector = torch.tensor(flat(numbers), dtype=torch.float32, device="cpu").to(device)

    def compiled(rows: Rows) -> None:
        keys = rows.keys(batch.keys)
        if keys.dim() > 2:
            eager(rows)  # too rare to have a kernel
        elif rows.u is None:
            kernel(rows.p, rows.g, *rows.state, vector, rows.low, keys, column)
        else:
            kernel(rows.p, rows.g, rows.u, *rows.state, vector, rows.low, keys, column)

    return compiled
