"""A stage on rows: one function, in eager mode or as a compiled kernel, and whether there is a compiler.

One kernel serves every number of rows from two up, every number and every seed: lengths are dynamic, numbers
and keys are tensors. It is compiled on memory of its own before any weight is touched, so that a compiler
that fails leaves everything as it was.
"""

import contextlib
import functools
import logging
import platform
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.bound_rule import flat, layout, unflat
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.compiler import find_cxx
from halfstep_torch.engine.plan import Stage
from halfstep_torch.engine.rows import Memory, Rows, Slot
from halfstep_torch.numbers.random_words import GOLDEN_RATIO

# Long enough that Inductor, which decides on the lengths it is first shown, runs the kernel in parallel.
_SCRATCH = 1 << 20
# Seconds of a compilation after which it is said what is waited for.
_PATIENCE = 2.0
# Not documented by GCC, so it is asked for.
_FROM_MEMORY = "-mtune-ctrl=^inter_unit_moves_to_vec"
_LOG = logging.getLogger("halfstep_torch")


def compile_batch(batch: Batch) -> None:
    """Compile the kernels that `run_batch` will call, if any; raise what torch.compile raises."""
    for k, stage in enumerate(batch.stages):
        if stage.compiles:
            _kernel(batch, k)


def _kernel(batch: Batch, k: int) -> Callable:
    layouts = layout(tuple(batch.stage_numbers(k)))
    return compiled_kernel(batch.stages[k], layouts, batch.device, torch.float32 if k else batch.grad_dtype)


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
                step(rows, row_keys(stage, rows, batch.keys))
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
        place = rows.spans[0].slot
        columns = keys.new_empty(len(keys), len(rows)).copy_(keys[:, place : place + 1])
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


def _step_of(batch: Batch, k: int, compiled: bool) -> Callable[[Rows, Tensor], None]:
    """Return what steps rows of the k-th stage, given their keys."""
    stage, numbers, device = batch.stages[k], batch.stage_numbers(k), batch.device
    column = _column(stage.width, device)

    def eager(rows: Rows, keys: Tensor) -> None:
        columns = keys[:, :, None] if keys.dim() == 2 else keys
        step_rows(stage, rows.p, rows.g, rows.u, rows.state, numbers, rows.low[:, None], columns, column)

    if not compiled or not stage.compiles:
        return eager
    kernel, vector = (
        _kernel(batch, k),
        torch.tensor(flat(numbers), dtype=torch.float32, device="cpu").to(device),
    )

    def by_kernel(rows: Rows, keys: Tensor) -> None:
        if keys.dim() > 2:
            eager(rows, keys)  # too rare to have a kernel
        else:
            kernel(rows.p, rows.g, rows.u, rows.state, vector, rows.low, keys, column)

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
def compiled_kernel(stage: Stage, layouts: tuple, device: torch.device, grad_dtype: torch.dtype) -> Callable:
    """Return a function (p, g, u, state, numbers, first, keys, column) that steps rows in place.

    Args:
        stage: of whole blocks.
        layouts: of the numbers of its rules (`rule.layout`).
        device: of the memory.
        grad_dtype: of what comes in: of the gradient, or float32.

    Returns:
        The function, compiled already: arguments as of `step_rows`, but state arrays in their `kernel_dtype`,
        `numbers` a float32 vector of the numbers of all rules, `first` in one row, `keys` a row for every
        column. From two rows up.

    Raises:
        Exception: whatever torch.compile raises where it cannot compile.
    """

    def step_in_place(
        p: Tensor,
        g: Tensor,
        u: Tensor | None,
        state: Sequence[Tensor],
        numbers: Tensor,
        first: Tensor,
        keys: Tensor,
        column: Tensor,
    ) -> None:
        of_rules = unflat(layouts, numbers.unbind())
        step_rows(stage, p, g, u, state, of_rules, first[:, None], keys[:, :, None], column)

    kernel = torch.compile(
        own_code(step_in_place), dynamic=True, fullgraph=True, options=compile_options(device)
    )
    count = max(_SCRATCH // stage.width, 4)
    memory = Memory(stage, count, device, grad_dtype, wide=True)
    p, g, u, state = memory.matrices(count)
    columns = sum(1 + len(roles) for roles in stage.roles)
    first, keys = (torch.zeros(*shape, count, dtype=torch.int32, device=device) for shape in ((), (columns,)))
    numbers = torch.ones(len(flat(layouts)), dtype=torch.float32, device=device)
    for x in (p, g, *([] if u is None else [u]), *(x for x in state if x.dim() == 2)):
        torch._dynamo.mark_static(x, 1)
    with compiling():
        kernel(p, g, u, state, numbers, first, keys, _column(stage.width, device))
    return kernel


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile what is called inside, and say once in a process what it waits for, if it waits."""
    timer = threading.Timer(_PATIENCE, _say)
    timer.daemon = True
    timer.start()
    try:
        with warnings.catch_warnings():
            # Inductor's modules warn, as they are imported, of what torch itself has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Inductor says that it runs such a kernel more slowly.
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed", UserWarning)
            # Lengths are dynamic; what a stage says (bits of mantissa, units, elements of a block) is fixed.
            with torch._dynamo.config.patch(specialize_int=True, specialize_float=True):
                yield
    finally:
        timer.cancel()


@functools.cache
def _say() -> None:
    _LOG.warning(
        "torch.compile is compiling the optimizer step: some seconds for each kernel, the first time on this "
        "machine. compile=False steps without it, more slowly, with the same bits."
    )


def own_code(function: Callable) -> Callable:
    """Return a copy of a function, code included."""
    # Dynamo keeps its graphs, and limits their number, per code object; every plan needs its own.
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def compile_options(device: torch.device) -> dict:
    """Return options of Inductor for one function; the global configuration is left alone."""
    from torch._inductor import config

    if device.type != "cpu":
        # Else Triton fuses products with sums, divides approximately and flushes subnormal numbers, which
        # eager torch does not.
        numerics = ("eager_numerics.division_rounding", "eager_numerics.disable_ftz")
        wanted = ("emulate_precision_casts", *numerics)
        return {name: True for name in wanted if _has(config, name)}
    # Past that many operations Inductor gives a value a loop body of its own, of 50 on a CPU: random words of
    # three roles then cut a bf16 step into bodies of float32 and int32, which it vectorises by half as many
    # elements at a time. At 60 the default step takes two thirds of the time; at 200 compiling takes minutes.
    options: dict = {"realize_opcount_threshold": 60} if _has(config, "realize_opcount_threshold") else {}
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return options
    if not hasattr(config.cpp, "march") or config.cpp.march is not None or "clang" in (find_cxx() or ""):
        return options
    # Inductor passes -fno-tree-loop-vectorize to g++, which leaves its bit casts (float32 to int32 and back)
    # as scalar loops and makes this kernel more than twice as slow. This is the one option that can carry the
    # flag that undoes it; it changes no bit.
    march = "native -ftree-loop-vectorize"
    # A step has more constants than there are registers; g++ makes the others anew in every turn, by two
    # instructions each, unless it is told to read them from memory, which takes none.
    return options | {"cpp.march": f"{march} {_FROM_MEMORY}" if _accepted(_FROM_MEMORY) else march}


@functools.cache
def _accepted(flag: str) -> bool:
    """Return whether the C++ compiler knows a flag."""
    cxx = find_cxx()
    command = [flag, "-march=native", "-fsyntax-only", "-x", "c++", "/dev/null"]
    return cxx is not None and not subprocess.run([cxx, *command], capture_output=True).returncode


def _has(config: types.ModuleType, name: str) -> bool:
    return name in config.get_config_copy()
