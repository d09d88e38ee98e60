"""A stage on rows: one function, in eager mode or as a compiled kernel, and whether there is a compiler.

One kernel serves every number of rows from two up, every number and every seed: lengths are dynamic, numbers
and keys are tensors. It is compiled on memory of its own before any weight is touched, so that a compiler
that fails leaves everything as it was.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.bound_rule import flat, layout, unflat
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.inductor import Inductor, compile_options, compiling, own_code
from halfstep_torch.engine.packed_rows import Memory
from halfstep_torch.engine.rows import Rows, Slot
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.random_words import GOLDEN_RATIO

# Long enough that Inductor, which decides on the lengths it is first shown, runs the kernel in parallel.
_SCRATCH = 1 << 20


def compile_batch(batch: Batch) -> None:
    """Compile the kernels that `run_batch` will call, if any; raise what torch.compile raises."""
    for k, stage in enumerate(batch.stages):
        if stage.compiles:
            _kernel(batch, k)


def _kernel(batch: Batch, k: int) -> Callable[..., None]:
    layouts = layout(tuple(batch.stage_numbers(k)))
    # Inductor writes the number of threads into a kernel for the CPU.
    threads = torch.get_num_threads() if batch.device.type == "cpu" else 0
    grad_dtype = torch.float32 if k else batch.grad_dtype
    return compiled_kernel(batch.stages[k], layouts, batch.device, grad_dtype, threads)


def run_batch(batch: Batch, compiled: bool) -> None:
    """Step the slots of a batch in place.

    Args:
        batch: with keys and a layout.
        compiled: whether stages are run by compiled kernels where they can be.
    """
    stages, steps = batch.stages, [_step_of(batch, k, compiled) for k in range(len(batch.stages))]
    for places, of_stages in batch.layout.groups:
        arriving = {place: batch.slots[place].grad for place in places}
        for k, (stage, step, of_stage) in enumerate(zip(stages, steps, of_stages, strict=True)):
            if stage.scope == "parameter":
                arriving = {place: _run_whole(batch, k, place, u) for place, u in arriving.items()}
                continue
            leaving = None if stage.lands else {place: _update_like(batch.slots[place]) for place in places}
            for rows in of_stage:
                rows.load(arriving, leaving)
                step(rows)
                rows.write_back(leaving)
            arriving = leaving or {}
    # Aliases have version counters of their own: autograd must learn that the weights changed.
    torch.autograd.graph.increment_version([slot.param for slot in batch.slots])


def _update_like(slot: Slot) -> Tensor:
    return torch.empty(slot.param.shape, dtype=torch.float32, device=slot.param.device)


def _run_whole(batch: Batch, k: int, place: int, u: Tensor) -> Tensor:
    """Run the k-th stage, which sees a whole parameter, in its shape; return the update that it leaves."""
    stage, slot, keys = batch.stages[k], batch.slots[place], batch.keys[:, place].tolist()
    state = {name: slot.state[name].view(-1) for name in stage.arrays}
    if not k:  # the rule may write into what it is given, and that is the gradient
        u = u.to(torch.float32, copy=True)
    words = stage.whole_words(keys, batch.device)
    out, new_state = stage.run(slot.param.detach(), u, state, batch.stage_numbers(k), words)
    for name, array in new_state.items():
        state[name].copy_(array.view(-1))
    if stage.lands:
        slot.param.detach().copy_(out)
    return out.contiguous()


def row_keys(stage: Stage, rows: Rows, keys: Tensor) -> Tensor:
    """Return the keys of rows: int32, of every column a number per row, or per element past 2^32.

    Args:
        stage: of the rows.
        rows: whose keys they are.
        keys: of the slots.
    """
    if rows.slots is None:
        columns = keys[:, rows.spans[0].slot, None].expand(-1, len(rows)).contiguous()
    else:
        columns = keys.index_select(1, rows.slots)
    if rows.high is None:
        return columns
    # Contract W8: the high half of the index is added to k1, golden ratio times.
    high = rows.high * (int(GOLDEN_RATIO) - (1 << 32))
    columns = columns[:, :, None].expand(-1, *high.shape).clone()
    for (_, of_roles), shared in zip(stage.columns(columns.unbind()), stage.shared, strict=True):
        for k1 in () if shared else of_roles.values():
            k1 += high
    return columns if high.shape[1] > 1 else columns[:, :, 0].contiguous()


def _step_of(batch: Batch, k: int, compiled: bool) -> Callable[[Rows], None]:
    """Return what steps rows of the k-th stage."""
    stage, numbers, device = batch.stages[k], batch.stage_numbers(k), batch.device
    column = _column(stage.width, device)

    def eager(rows: Rows) -> None:
        keys = row_keys(stage, rows, batch.keys)
        columns = keys[:, :, None] if keys.dim() == 2 else keys
        step_rows(stage, rows.p, rows.g, rows.u, rows.state, numbers, rows.low[:, None], columns, column)

    if not compiled or not stage.compiles:
        return eager
    kernel = _kernel(batch, k)
    vector = torch.tensor(flat(numbers), dtype=torch.float32, device="cpu").to(device)

    def by_kernel(rows: Rows) -> None:
        keys = row_keys(stage, rows, batch.keys)
        if keys.dim() > 2:
            eager(rows)  # too rare to have a kernel
        elif rows.u is None:
            kernel(rows.p, rows.g, *rows.state, vector, rows.low, keys, column)
        else:
            kernel(rows.p, rows.g, rows.u, *rows.state, vector, rows.low, keys, column)

    return by_kernel


@functools.cache
def _column(width: int, device: torch.device) -> Tensor:
    return torch.arange(width, dtype=torch.int32, device=device)


def step_rows(
    stage: Stage,
    p: Tensor,
    g: Tensor,
    u: Tensor | None,
    state: Sequence[Tensor],
    numbers: Sequence[Any],
    first: Tensor,
    keys: Tensor,
    column: Tensor,
) -> None:
    """Step rows in place.

    Args:
        stage: of whole blocks.
        p: weights, in rows of the stage's width.
        g: their gradient, or the update of the stage before.
        u: where the stage's own update goes; None where it changes the weights.
        state: state arrays, in rows; scales in one.
        numbers: of each rule, by name: floats, or 0-d tensors in compiled code.
        first: int32, in a column: the index of the first element of each row, its low half.
        keys: int32: columns of k0 and k1 of each stream.
        column: 0, 1, ... up to the width.
    """
    old = dict(zip(stage.arrays, state, strict=True))
    words = stage.row_words(lambda: first + column, keys.unbind())
    out, new = stage.run(_in_rows(p, first), g, old, numbers, words)
    (p if u is None else u).copy_(out)
    for name, array in new.items():
        old[name].copy_(array)


def _in_rows(p: Tensor, first: Tensor) -> Tensor:
    """Return the weights, by a choice that every row makes for itself and that is always the same.

    Else Inductor, on a CPU, runs over weights that draw no words as over one line, and over moments in rows:
    it cuts the step in two, and keeps the moments in memory in between.
    """
    if p.device.type != "cpu" or not torch.compiler.is_compiling():
        return p
    return torch.where(first >= -(2**31), p, 0)


@functools.cache
def compiled_kernel(
    stage: Stage, layouts: tuple, device: torch.device, grad_dtype: torch.dtype, threads: int
) -> Callable[..., None]:
    """Return a function (p, g, u, *state, numbers, first, keys, column) that steps rows in place.

    Args:
        stage: of whole blocks.
        layouts: of the numbers of its rules (`rule.layout`).
        device: of the memory.
        grad_dtype: of what comes in: of the gradient, or float32.
        threads: of the CPU.

    Returns:
        The function, compiled already: arguments as of `step_rows`, but no `u` where the stage changes the
        weights, state arrays in their `kernel_dtype`, `numbers` a float32 vector of the numbers of all rules,
        `first` in one row, `keys` a row for every column. From two rows up.

    Raises:
        Exception: whatever torch.compile raises where it cannot compile.
    """

    def step_in_place(*tensors: Tensor) -> None:
        p, g, *rest, numbers, first, keys, column = tensors
        u, state = (None, rest) if stage.lands else (rest[0], rest[1:])
        of_rules = unflat(layouts, numbers.unbind())
        step_rows(stage, p, g, u, state, of_rules, first[:, None], keys[:, :, None], column)

    backend = Inductor(compile_options(device))
    kernel = torch.compile(own_code(step_in_place), dynamic=True, fullgraph=True, backend=backend)
    calls = list(_scratch(stage, layouts, device, grad_dtype))
    with compiling():
        for tensors in calls:  # the second time by what the first has compiled
            kernel(*tensors)
    return backend.direct(calls) or kernel


def _scratch(
    stage: Stage, layouts: tuple, device: torch.device, grad_dtype: torch.dtype
) -> Iterator[Sequence[Tensor]]:
    """Yield arguments of a kernel, over memory of ours: of many rows, and of one less."""
    most = max(_SCRATCH // stage.width, 4)
    memory = Memory(stage, most, device, grad_dtype, wide=True)
    columns = sum(1 + len(roles) for roles in stage.roles)
    numbers = torch.ones(len(flat(layouts)), dtype=torch.float32, device=device)
    for count in (most, most - 1):
        p, g, u, state = memory.matrices(count)
        first, keys = (
            torch.zeros(*axes, count, dtype=torch.int32, device=device) for axes in ((), (columns,))
        )
        matrices = [p, g, *([] if u is None else [u]), *state]
        for x in matrices:
            if x.dim() == 2:
                torch._dynamo.mark_static(x, 1)
        yield *matrices, numbers, first, keys, _column(stage.width, device)
