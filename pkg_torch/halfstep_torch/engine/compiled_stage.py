"""A stage as a compiled kernel.

One kernel serves every number of rows from two up, every number and every seed: lengths are dynamic, numbers
and keys are tensors. It is compiled on memory of its own before any weight is touched, so that a compiler
that fails leaves everything as it was.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.inductor import compile_options, compile_rows, mark_width
from halfstep_torch.engine.kernel_store import checked, is_stored, kernel_name, store
from halfstep_torch.engine.packed_rows import Memory
from halfstep_torch.engine.stage import Stage, column
from halfstep_torch.engine.step_numbers import flat, number_places, unflat

# Long enough that Inductor, which decides on the lengths it is first shown, runs the kernel in parallel.
_SCRATCH = 1 << 20


def compile_batch(batch: Batch) -> None:
    """Compile the stages of a batch that can be compiled; raise what torch.compile raises."""
    kernels: list[dict[bool, Callable[..., None]]] = [{} for _ in batch.plan.padded_stages]
    for k, stage, places, by_row, where in _compiling(batch):
        for single_slot in kinds(stage, batch.device):
            kernels[k][single_slot] = compiled_stage(
                stage, places, by_row and not single_slot, single_slot, *where
            )
    batch.kernels = kernels


def is_at_hand(batch: Batch) -> bool:
    """Whether all kernels of a batch are stored, so that compiling only loads them."""
    names = [_name(*parts, *where) for _, *parts, (_, *where) in _compiling(batch)]
    return batch.device.type == "cpu" and bool(names) and all(map(is_stored, names))


def _compiling(batch: Batch) -> Iterator[tuple[int, Stage, tuple, bool, tuple]]:
    """Yield each stage that compiles: index, stage, places of its numbers, whether rows have their own.

    At last the device, the dtype of what comes in, and the threads, which Inductor writes into a kernel for
    the CPU.
    """
    threads = torch.get_num_threads() if batch.device.type == "cpu" else 0
    for k, stage in enumerate(batch.plan.padded_stages):
        if stage.compiles:
            numbers, *others = batch.stage_numbers(k).values()
            where = batch.device, torch.float32 if k else batch.grad_dtype, threads
            yield k, stage, number_places(tuple(numbers)), bool(others), where


@functools.cache
def _name(stage: Stage, places: tuple, by_row: bool, grad_dtype: torch.dtype, threads: int) -> str | None:
    """Return the name of a stored kernel for the CPU."""
    return kernel_name(stage, places, by_row, grad_dtype, threads)


def kinds(stage: Stage, device: torch.device) -> tuple[bool, ...]:
    """Return the kinds of kernels: False for rows of many parameters, True for rows of one parameter.

    On a GPU a kernel that reads a key for every row takes twelve instructions more for each element. Where
    there are blocks, Inductor would keep the indices of their elements in memory.
    """
    return (False,) if device.type == "cpu" or stage.blocks else (False, True)


def in_blocks(stage: Stage, device: torch.device) -> bool:
    """Return whether a kernel sees the finest blocks of rows as a further, last axis.

    On a CPU Inductor writes a loop for each axis. If it is given rows alone, it divides indices to find
    blocks within blocks, and codes that share a byte. Then it reads one element at a time.
    """
    if device.type != "cpu" or not stage.blocks:
        return False
    packs = any(spec.packed_of for spec in stage.arrays.values())
    return stage.blocks[-1].size % 8 == 0 and (packs or len(stage.blocks) > 1)


@functools.cache
def compiled_stage(
    stage: Stage,
    places: tuple,
    by_row: bool,
    single_slot: bool,
    device: torch.device,
    grad_dtype: torch.dtype,
    threads: int,
) -> Callable[..., None]:
    """Return a function (p, g, u, *state, numbers, first, keys, column) that steps rows in place.

    Args:
        stage: of whole blocks.
        places: where the numbers of its rules stand in a vector (`number_places`).
        by_row: whether each row has numbers of its own.
        single_slot: whether rows are those of one parameter, next to each other: then `first` and each column
            of `keys` have one entry.
        device: of the memory.
        grad_dtype: of what comes in: of the gradient, or float32.
        threads: of the CPU.

    Returns:
        The function, compiled already, for two rows or more. Its arguments are those of `Stage.step_rows`,
        with these differences. There is no `u` where the stage changes the weights. State arrays are in their
        `kernel_dtype`. `numbers` is a float32 vector of the numbers of all rules or, if `by_row`, a matrix
        with a row for each number. `first` is a row. `keys` has a row for every column of `keys` there.

    Raises:
        Exception: whatever torch.compile raises where it cannot compile.
    """
    nested = in_blocks(stage, device)

    def step_in_place(*tensors: Tensor) -> None:
        p, g, *rest, numbers, first, keys, column = tensors
        u, state = (None, rest) if stage.applies else (rest[0], rest[1:])
        if single_slot:
            first = first + stage.width * torch.arange(p.shape[0], dtype=torch.int32, device=p.device)
        numbers, first, keys = numbers[:, :, None] if by_row else numbers, first[:, None], keys[:, :, None]
        if nested:
            p, g, *state = (_in_blocks(stage, x) for x in (p, g, *state))
            u = None if u is None else _in_blocks(stage, u)
            numbers, first, keys = (x[..., None] if x.dim() > 1 else x for x in (numbers, first, keys))
            # Both summands are read from memory, or else Inductor makes one loop of these two axes.
            column = column.view(p.shape[1:])[:, :1] + column[: p.shape[2]]
        stage.step_rows(p, g, u, state, unflat(places, numbers.unbind()), first, keys, column)

    scratch = functools.partial(_scratch, stage, len(flat(places)), by_row, device, grad_dtype, single_slot)
    name = _name(stage, places, by_row, grad_dtype, threads) if device.type == "cpu" else None

    def has_same_bits(stored: Callable[..., None]) -> bool:
        ours, theirs = ([x.clone() for x in next(scratch(8))] for _ in range(2))
        return _same_bits(stored, step_in_place, ours, theirs)

    if (stored := checked(name, has_same_bits)) is not None:
        return stored
    # Dynamo does not enter a cached property that nobody has read before.
    step_in_place(*next(scratch(2)))
    keep = functools.partial(store, name)
    return compile_rows(step_in_place, compile_options(device), list(scratch(_SCRATCH // stage.width)), keep)


def _same_bits(
    stored: Callable[..., None],
    eager: Callable[..., None],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
) -> bool:
    """Whether a stored kernel gives the bits of eager steps, tried on scratch memory."""
    generator = torch.Generator().manual_seed(0)
    p, g, *_, numbers, first, keys, column = ours
    p.copy_(torch.randn(p.shape, generator=generator))
    numbers.copy_(torch.rand(numbers.shape, generator=generator) * 0.5 + 0.25)
    first.copy_(torch.arange(len(first)) * len(column))
    for step in (eager, eager, stored):
        g.copy_(torch.randn(g.shape, generator=generator))
        keys.random_(generator=generator)
        for x, y in zip(ours, theirs, strict=True):
            y.copy_(x)
        step(*ours)
    eager(*theirs)
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def _in_blocks(stage: Stage, x: Tensor) -> Tensor:
    """Return rows with their finest blocks as the last of three axes; scales are unchanged."""
    return x if x.dim() == 1 else x.view(x.shape[0], stage.width // stage.blocks[-1].size, -1)


def _scratch(
    stage: Stage,
    numbers: int,
    by_row: bool,
    device: torch.device,
    grad_dtype: torch.dtype,
    single_slot: bool,
    rows: int,
) -> Iterator[Sequence[Tensor]]:
    """Yield arguments of a kernel in scratch memory: for `rows` rows, and for one less."""
    most = max(rows, 4)
    memory = Memory(stage, most, device, grad_dtype, wide=True)
    columns = sum(1 + len(roles) for roles in stage.roles)
    for count in (most, most - 1):
        p, g, u, state = memory.matrices(count)
        first, keys = (
            torch.zeros(*axes, 1 if single_slot else count, dtype=torch.int32, device=device)
            for axes in ((), (columns,))
        )
        matrices = [p, g, *([] if u is None else [u]), *state]
        for x in matrices:
            if x.dim() == 2:
                mark_width(x)
        ones = torch.ones((numbers, count) if by_row else numbers, dtype=torch.float32, device=device)
        yield *matrices, ones, first, keys, column(stage.width, device)
