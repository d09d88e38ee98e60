"""From parameters to the flat memory that a plan works on, and back.

Weights and state are changed in place, never replaced. The order of elements is the row-major order of the
logical array, whatever the layout in memory: that order gives the random words their index (contract W8).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.bound_rule import layout
from halfstep_torch.engine.batches import Batch, Slot
from halfstep_torch.engine.compiling import alias, compiled_kernel, kernel_dtype
from halfstep_torch.engine.step import Plan, keys_at
from halfstep_torch.numbers.random_words import as_int32


def compile_batch(batch: Batch, compiled_from: int) -> None:
    """Compile the kernels that `run_batch` will call, if any; raise what torch.compile raises."""
    for i, stage in enumerate(batch.plan.stages):
        if any(_is_compiled(stage, leaf, compiled_from) for leaf in batch.leaves):
            _kernel(batch, i)


def _kernel(batch: Batch, i: int) -> Callable:
    """Return the kernel of the i-th stage."""
    whole = batch.plan.stages[i].whole
    assert whole is not None
    layouts = layout(tuple(batch.stage_numbers[i]))
    return compiled_kernel(whole, layouts, batch.device, torch.float32 if i else batch.grad_dtype)


def run_batch(batch: Batch, compiled_from: int | None) -> None:
    """Step the leaves of a batch in place.

    Args:
        batch: of leaves with their state and keys.
        compiled_from: number of elements from which a leaf is stepped by a compiled kernel; None: never.
    """
    piece = eager_piece(batch.device)
    compiled, together, length = [], [], 0
    for leaf in batch.leaves:
        n = leaf.param.numel()
        if any(_is_compiled(stage, leaf, compiled_from) for stage in batch.plan.stages):
            compiled.append(leaf)
        elif n >= piece:
            _run_alone(batch, leaf, None)
        else:
            if length + n > piece:
                _run_together(batch, together)
                together, length = [], 0
            together.append(leaf)
            length += n
    if length:
        _run_together(batch, together)
    for leaf in compiled:
        _run_alone(batch, leaf, compiled_from)


def _is_compiled(stage: Plan, leaf: Slot, compiled_from: int | None) -> bool:
    """Whether a stage of a leaf is stepped by a compiled kernel."""
    # One unit alone would be a graph of its own.
    if compiled_from is None or stage.scope != "elementwise":
        return False
    return leaf.param.numel() >= max(compiled_from, 2 * stage.unit) and stage.whole is not None


def eager_piece(device: torch.device) -> int:
    """Return how many elements are stepped at once in eager mode: on CPU, what fits a cache."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def compiled_piece(device: torch.device, plan: Plan) -> int:
    """Return how many elements are stepped by one call of a compiled kernel: positions count in int32.

    Block maxima make passes of their own, with temporaries between them: on CPU those stay in cache. So do
    the copies that make short blocks whole, and those of arrays that the kernel wants in another dtype.
    """
    widened = any(kernel_dtype(kept.dtype, device) != kept.dtype for kept in plan.arrays.values())
    if not plan.blocks and not widened:
        return 1 << 30
    return 1 << 18 if device.type == "cpu" else 1 << 26


def _run_together(batch: Batch, leaves: Sequence[Slot]) -> None:
    """Step short leaves end to end, as one array whose keys vary."""
    params = [leaf.param.detach() for leaf in leaves]
    lengths = [p.numel() for p in params]
    p = torch.cat([p.reshape(-1) for p in params])
    u = torch.cat([leaf.grad.reshape(-1) for leaf in leaves])
    keys = _keys_together(leaves, lengths, batch.device)
    for stage, numbers in zip(batch.plan.stages, batch.stage_numbers, strict=True):
        if stage.scope == "parameter":
            parts = zip(leaves, params, u.split(lengths), strict=True)
            u = torch.cat([_run_whole(stage, numbers, leaf, p, part).view(-1) for leaf, p, part in parts])
            continue
        state = {name: torch.cat([leaf.state[name].view(-1) for leaf in leaves]) for name in stage.arrays}
        u, new_state = stage.run(p, u, state, numbers, keys)
        for name, array in new_state.items():
            sizes = [leaf.state[name].numel() for leaf in leaves]
            for leaf, new in zip(leaves, array.split(sizes), strict=True):
                leaf.state[name].view(-1).copy_(new)
    for param, new in zip(params, u.split(lengths), strict=True):
        param.copy_(new.view(param.shape))


def _run_whole(stage: Plan, numbers: Sequence, leaf: Slot, param: Tensor, u: Tensor) -> Tensor:
    """Run a stage that sees a whole leaf, in its shape; return what `Plan.run` does."""
    state = {name: leaf.state[name].view(-1) for name in stage.arrays}
    keys = as_int32(leaf.keys).tolist()
    out, new_state = stage.run(param, u.view(param.shape), state, numbers, keys)
    for name, array in new_state.items():
        leaf.state[name].view(-1).copy_(array.view(-1))
    return out


def _keys_together(leaves: Sequence[Slot], lengths: Sequence[int], device: torch.device) -> Sequence:
    """Return the columns of keys, one row per element; of a single leaf, plain numbers."""
    rows = np.stack([leaf.keys for leaf in leaves])
    if len(leaves) == 1:
        return as_int32(rows[0]).tolist()
    rows[:, 0] -= np.cumsum([0, *lengths[:-1]]).astype(np.uint32)
    columns = np.repeat(np.ascontiguousarray(as_int32(rows).T), lengths, axis=1)
    return torch.from_numpy(columns).to(device).unbind()


@dataclasses.dataclass
class _Piece:
    """A stretch of whole blocks of a leaf, in row-major order.

    Attributes:
        p: weights, in one row.
        g: gradient, or the update of the stage before.
        u: what the stage leaves to the next one; None where it changes the weights.
        state: state arrays; scales of the stretch alone.
        start: row-major index of its first element.
        stop: the index past its last one.
    """

    p: Tensor
    g: Tensor
    u: Tensor | None
    state: dict[str, Tensor]
    start: int
    stop: int


def _run_alone(batch: Batch, leaf: Slot, compiled_from: int | None) -> None:
    """Step one leaf, stage after stage."""
    param, incoming = leaf.param.detach(), leaf.grad.contiguous()
    rows = param.contiguous()
    for i, stage in enumerate(batch.plan.stages):
        if stage.scope == "parameter":
            incoming = _run_whole(stage, batch.stage_numbers[i], leaf, rows, incoming).contiguous()
            if stage.lands:
                rows.copy_(incoming)
            continue
        u = None if stage.lands else torch.empty(param.numel(), dtype=torch.float32, device=batch.device)
        arrays = rows, incoming, u
        if _is_compiled(stage, leaf, compiled_from):
            _run_compiled(batch, i, leaf, arrays)
        else:
            _run_in_pieces(batch, i, leaf, arrays)
        incoming = incoming if u is None else u
    if rows.data_ptr() == param.data_ptr():
        # The aliases have version counters of their own: autograd must learn that the weights changed.
        torch.autograd.graph.increment_version(leaf.param)
    else:
        param.copy_(rows)


def _pieces(stage: Plan, leaf: Slot, arrays: Sequence, length: int) -> Iterator[_Piece]:
    """Yield flat aliases of a leaf's memory.

    Args:
        stage: of the leaf's plan.
        leaf: the parameter.
        arrays: row-major weights, gradient or update, and what the stage leaves to the next, or None.
        length: elements of a piece: about as many, of whole blocks.
    """
    total = leaf.param.numel()
    length = max(length // stage.unit, 1) * stage.unit
    for start in range(0, total, length):
        stop = min(start + length, total)
        state = {
            name: alias(leaf.state[name], kept.size(start), kept.size(stop - start))
            for name, kept in stage.arrays.items()
        }
        p, g, u = (x if x is None else alias(x, start, stop - start) for x in arrays)
        assert p is not None
        assert g is not None
        yield _Piece(p, g, u, state, start, stop)


def _run_in_pieces(batch: Batch, i: int, leaf: Slot, arrays: Sequence) -> None:
    """Run the i-th stage of a long leaf in eager mode."""
    stage, numbers = batch.plan.stages[i], batch.stage_numbers[i]
    for piece in _pieces(stage, leaf, arrays, eager_piece(batch.device)):
        _run_piece(stage, numbers, leaf, piece)


def _run_piece(stage: Plan, numbers: Sequence, leaf: Slot, piece: _Piece) -> None:
    keys = _keys_of(stage, leaf, piece, piece.p.device)
    out, new_state = stage.run(piece.p, piece.g, piece.state, numbers, keys)
    (piece.p if piece.u is None else piece.u).copy_(out)
    for name, array in new_state.items():
        piece.state[name].copy_(array)


def _keys_of(plan: Plan, leaf: Slot, piece: _Piece, device: torch.device) -> Sequence:
    """Return the keys of a piece: plain numbers, or, where the high half of the index changes, columns."""
    row, edge = keys_at(plan, leaf.keys, piece.start), (piece.start >> 32) + 1 << 32
    if piece.stop <= edge:
        return as_int32(row).tolist()
    past = keys_at(plan, leaf.keys, edge)
    past[0] = row[0]  # the low half of the index wraps by itself
    columns = np.ascontiguousarray(as_int32(np.stack([row, past])).T)
    columns = np.repeat(columns, [edge - piece.start, piece.stop - edge], axis=1)
    return torch.from_numpy(columns).to(device).unbind()


def _run_compiled(batch: Batch, i: int, leaf: Slot, arrays: Sequence) -> None:
    """Run the i-th stage of a leaf by its compiled kernel, one call for every piece."""
    stage, vector = batch.plan.stages[i], batch.stage_vectors[i]
    whole = stage.whole
    kernel = _kernel(batch, i)
    for piece in _pieces(stage, leaf, arrays, compiled_piece(batch.device, stage)):
        if piece.start >> 32 != (piece.stop - 1) >> 32:
            _run_piece(stage, batch.stage_numbers[i], leaf, piece)  # too rare to have a kernel
            continue
        row = keys_at(stage, leaf.keys, piece.start) if piece.start else leaf.keys
        keys = torch.from_numpy(as_int32(row)).to(batch.device)
        if stage is whole:
            units = (piece.stop - piece.start) // stage.unit
            offsets = keys.new_zeros(units) if stage.blocks else None
            _call(stage, kernel, piece.p, piece.g, piece.u, piece.state, vector, keys, offsets)
        else:
            _run_padded(stage, kernel, piece, vector, keys)


def _call(
    stage: Plan,
    kernel: Callable,
    p: Tensor,
    g: Tensor,
    u: Tensor | None,
    state: Mapping[str, Tensor],
    *others: Tensor | None,
) -> None:
    """Call a kernel with row-major tensors: in the shapes and dtypes that it wants."""
    if stage.blocks:
        p, g = (alias(x, 0, x.numel(), stage.unit) for x in (p, g))
        u = u if u is None else alias(u, 0, u.numel(), stage.unit)
        kept = stage.arrays
        state = {
            name: x if kept[name].scale_of else alias(x, 0, x.numel(), kept[name].size(stage.unit))
            for name, x in state.items()
        }
    wide = [x.to(kernel_dtype(x.dtype, x.device)) for x in state.values()]
    kernel(p, g, u, wide, *others)
    for x, stepped in zip(state.values(), wide, strict=True):
        if stepped is not x:
            x.copy_(stepped)


def _run_padded(plan: Plan, kernel: Callable, piece: _Piece, numbers: Tensor, keys: Tensor) -> None:
    """Step a piece with short blocks in memory where they are whole."""
    (blocks,) = plan.blocks
    assert plan.whole is not None
    runs, rows = piece.p.numel() // blocks.unit, {}
    elements = {name: x for name, x in piece.state.items() if plan.arrays[name].scale_of is None}
    padded = {name: plan.whole.arrays[name].size(blocks.padded) for name in elements}
    changed = {"p": piece.p, **elements} if piece.u is None else {"u": piece.u, **elements}
    for name, x in {"p": piece.p, "g": piece.g, **changed}.items():
        rows[name] = x.new_zeros(runs, padded.get(name, blocks.padded))
        rows[name][:, : x.numel() // runs] = x.view(runs, -1)
    state = {name: rows[name] if name in elements else x for name, x in piece.state.items()}
    in_run = blocks.padded // blocks.size
    gap = blocks.padded - blocks.unit
    offsets = torch.arange(0, -runs * gap, -gap, dtype=torch.int32, device=keys.device)
    offsets = offsets.repeat_interleave(in_run)
    _call(plan.whole, kernel, rows["p"], rows["g"], rows.get("u"), state, numbers, keys, offsets)
    for name, x in changed.items():
        x.view(runs, -1).copy_(rows[name][:, : x.numel() // runs])
        if name in elements and plan.arrays[name].packed_of and blocks.unit % 2:
            x.view(runs, -1)[:, -1] &= 15  # the other half byte is no element's
