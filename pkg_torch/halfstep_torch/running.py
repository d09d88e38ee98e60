"""From parameters to the flat memory that a plan works on, and back.

Weights and state are changed in place, never replaced. The order of elements is the row-major order of the
logical array, whatever the layout in memory: that order gives the random words their index (contract W8).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import StateArray
from halfstep_torch.compiling import compiled_kernel, in_rows, kernel_dtype
from halfstep_torch.leaves import check_state_array
from halfstep_torch.random_words import as_int32, leaf_id
from halfstep_torch.step import Plan, keys_at, stream_keys


@dataclasses.dataclass
class Leaf:
    """A parameter on its way through one step.

    Attributes:
        param: the weights, with a gradient.
        name: the leaf name.
        step: the count after this step.
        state: state arrays, row-major.
        keys: for the random words; uint32, as `stream_keys` gives them.
    """

    param: Tensor
    name: str
    step: int
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    keys: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.uint32))

    @property
    def grad(self) -> Tensor:
        """The gradient, detached."""
        assert self.param.grad is not None
        return self.param.grad.detach()


@dataclasses.dataclass
class Batch:
    """Leaves that share a plan, its numbers, a device and the dtype of their gradients.

    Attributes:
        plan: of the leaves.
        numbers: of each rule.
        device: of the leaves.
        grad_dtype: of their gradients.
        leaves: the parameters.
    """

    plan: Plan
    numbers: list[tuple[float, ...]]
    device: torch.device
    grad_dtype: torch.dtype
    leaves: list[Leaf] = dataclasses.field(default_factory=list)

    def compile(self, compiled_from: int) -> None:
        """Compile the kernel that `run` will call, if it will call one; raise what torch.compile raises."""
        if any(self._compiled(leaf, compiled_from) for leaf in self.leaves):
            compiled_kernel(self.plan.whole, self.device, self.grad_dtype)

    def _compiled(self, leaf: Leaf, compiled_from: int | None) -> bool:
        """Whether a leaf is stepped by a compiled kernel."""
        # One unit alone would be a graph of its own.
        long_enough = compiled_from is not None and leaf.param.numel() >= max(
            compiled_from, 2 * self.plan.unit
        )
        return long_enough and self.plan.whole is not None

    def run(self, compiled_from: int | None) -> None:
        """Step the leaves in place.

        Args:
            compiled_from: number of elements from which a leaf is stepped by a compiled kernel; None: never.
        """
        piece = eager_piece(self.device)
        compiled, together, length = [], [], 0
        for leaf in self.leaves:
            n = leaf.param.numel()
            if self._compiled(leaf, compiled_from):
                compiled.append(leaf)
            elif n >= piece:
                _run_in_pieces(self, leaf)
            else:
                if length + n > piece:
                    _run_together(self, together)
                    together, length = [], 0
                together.append(leaf)
                length += n
        if length:
            _run_together(self, together)
        if compiled:
            _run_compiled(self, compiled)


def attach_state(function: str, batches: Sequence[Batch], states: MutableMapping[Tensor, Any]) -> None:
    """Give leaves their state arrays: new parameters get zeros, those of others are checked.

    Args:
        function: for messages.
        batches: of leaves.
        states: an optimizer's state, from parameter to its flat dict.
    """
    for batch in batches:
        arrays = batch.plan.arrays
        for leaf in batch.leaves:
            state = states[leaf.param]
            if not state:
                state.update(new_state(leaf.param, arrays))
            # A momentum that was 0 until now had no buffer.
            state.update({key: kept.new(leaf.param) for key, kept in arrays.items() if key not in state})
            for key, kept in arrays.items():
                check_state_array(function, leaf.name, key, kept, state[key], leaf.param)
            leaf.state = {key: state[key] for key in arrays}


def new_state(param: Tensor, arrays: Mapping[str, StateArray]) -> dict[str, Tensor]:
    """Return the state of a parameter that was never stepped.

    Args:
        param: the weights.
        arrays: what is kept for it.
    """
    step = torch.zeros((), dtype=torch.int64)
    return {"step": step, **{key: kept.new(param) for key, kept in arrays.items()}}


def attach_keys(batches: Sequence[Batch], seeds: Sequence[int | None]) -> None:
    """Give leaves the keys of their random words, those of equal streams derived at once.

    Args:
        batches: of leaves.
        seeds: of each link of the chain.
    """
    by_streams: dict[tuple, list[Leaf]] = {}
    for batch in batches:
        by_streams.setdefault(batch.plan.streams(seeds), []).extend(batch.leaves)
    for streams, leaves in by_streams.items():
        rows = stream_keys(streams, [leaf.step for leaf in leaves], [leaf_id(leaf.name) for leaf in leaves])
        for leaf, row in zip(leaves, rows, strict=True):
            leaf.keys = row


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


def _run_together(batch: Batch, leaves: Sequence[Leaf]) -> None:
    """Step short leaves end to end, as one array whose keys vary."""
    params = [leaf.param.detach() for leaf in leaves]
    lengths = [p.numel() for p in params]
    p = torch.cat([p.reshape(-1) for p in params])
    g = torch.cat([leaf.grad.reshape(-1) for leaf in leaves])
    state = {name: torch.cat([leaf.state[name].view(-1) for leaf in leaves]) for name in batch.plan.arrays}
    keys = _keys_together(leaves, lengths, batch.device)
    new_p, new_state = batch.plan.run(p, g, state, batch.numbers, keys)
    for param, new in zip(params, new_p.split(lengths), strict=True):
        param.copy_(new.view(param.shape))
    for name, array in new_state.items():
        sizes = [leaf.state[name].numel() for leaf in leaves]
        for leaf, new in zip(leaves, array.split(sizes), strict=True):
            leaf.state[name].view(-1).copy_(new)


def _keys_together(leaves: Sequence[Leaf], lengths: Sequence[int], device: torch.device) -> Sequence:
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
        g: gradient.
        state: state arrays; scales of the stretch alone.
        start: row-major index of its first element.
        stop: the index past its last one.
    """

    p: Tensor
    g: Tensor
    state: dict[str, Tensor]
    start: int
    stop: int


def _pieces(plan: Plan, leaf: Leaf, length: int) -> Iterator[_Piece]:
    """Yield flat aliases of a leaf's weights, gradient and state.

    Where memory has another order, the weights are a row-major copy that is written back at the end.

    Args:
        plan: of the leaf.
        leaf: the parameter.
        length: elements of a piece: about as many, of whole blocks.
    """
    param, total = leaf.param.detach(), leaf.param.numel()
    rows, grad = param.contiguous(), leaf.grad.contiguous()
    length = max(length // plan.unit, 1) * plan.unit
    for start in range(0, total, length):
        stop = min(start + length, total)
        state = {
            name: flat(leaf.state[name], kept.size(start), kept.size(stop - start))
            for name, kept in plan.arrays.items()
        }
        yield _Piece(flat(rows, start, stop - start), flat(grad, start, stop - start), state, start, stop)
    if rows.data_ptr() == param.data_ptr():
        # The aliases have version counters of their own: autograd must learn that the weights changed.
        torch.autograd.graph.increment_version(leaf.param)
    else:
        param.copy_(rows)


def _run_in_pieces(batch: Batch, leaf: Leaf) -> None:
    """Step one long leaf in eager mode."""
    for piece in _pieces(batch.plan, leaf, eager_piece(batch.device)):
        _run_piece(batch, leaf, piece)


def _run_piece(batch: Batch, leaf: Leaf, piece: _Piece) -> None:
    keys = _keys_of(batch.plan, leaf, piece, batch.device)
    new_p, new_state = batch.plan.run(piece.p, piece.g, piece.state, batch.numbers, keys)
    piece.p.copy_(new_p)
    for name, array in piece.state.items():
        array.copy_(new_state[name])


def _keys_of(plan: Plan, leaf: Leaf, piece: _Piece, device: torch.device) -> Sequence:
    """Return the keys of a piece: plain numbers, or, where the high half of the index changes, columns."""
    row, edge = keys_at(plan, leaf.keys, piece.start), (piece.start >> 32) + 1 << 32
    if piece.stop <= edge:
        return as_int32(row).tolist()
    past = keys_at(plan, leaf.keys, edge)
    past[0] = row[0]  # the low half of the index wraps by itself
    columns = np.ascontiguousarray(as_int32(np.stack([row, past])).T)
    columns = np.repeat(columns, [edge - piece.start, piece.stop - edge], axis=1)
    return torch.from_numpy(columns).to(device).unbind()


def _run_compiled(batch: Batch, leaves: Sequence[Leaf]) -> None:
    """Step leaves by the compiled kernel, one call for every piece."""
    plan, whole = batch.plan, batch.plan.whole
    assert whole is not None
    kernel = compiled_kernel(whole, batch.device, batch.grad_dtype)
    numbers = torch.tensor([x for of_rule in batch.numbers for x in of_rule], dtype=torch.float32)
    numbers = numbers.to(batch.device)
    for leaf in leaves:
        for piece in _pieces(plan, leaf, compiled_piece(batch.device, plan)):
            if piece.start >> 32 != (piece.stop - 1) >> 32:
                _run_piece(batch, leaf, piece)  # too rare to have a kernel
                continue
            row = keys_at(plan, leaf.keys, piece.start) if piece.start else leaf.keys
            keys = torch.from_numpy(as_int32(row)).to(batch.device)
            if plan is whole:
                units = (piece.stop - piece.start) // plan.unit
                offsets = keys.new_zeros(units) if plan.blocks else None
                _call(plan, kernel, piece.p, piece.g, piece.state, numbers, keys, offsets)
            else:
                _run_padded(plan, kernel, piece, numbers, keys)


def _call(
    plan: Plan, kernel: Callable, p: Tensor, g: Tensor, state: Mapping[str, Tensor], *others: Tensor | None
) -> None:
    """Call a kernel with flat tensors: in the shapes and dtypes that it wants."""
    if plan.blocks:
        p, g = in_rows(p, plan.unit), in_rows(g, plan.unit)
        kept = plan.arrays
        state = {
            name: x if kept[name].scale_of else in_rows(x, kept[name].size(plan.unit))
            for name, x in state.items()
        }
    wide = [x.to(kernel_dtype(x.dtype, x.device)) for x in state.values()]
    kernel(p, g, wide, *others)
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
    for name, x in {"p": piece.p, "g": piece.g, **elements}.items():
        rows[name] = x.new_zeros(runs, padded.get(name, blocks.padded))
        rows[name][:, : x.numel() // runs] = x.view(runs, -1)
    state = {name: rows[name] if name in elements else x for name, x in piece.state.items()}
    in_run = blocks.padded // blocks.size
    gap = blocks.padded - blocks.unit
    offsets = torch.arange(0, -runs * gap, -gap, dtype=torch.int32, device=keys.device)
    offsets = offsets.repeat_interleave(in_run)
    _call(plan.whole, kernel, rows["p"], rows["g"], state, numbers, keys, offsets)
    for name, x in {"p": piece.p, **elements}.items():
        x.view(runs, -1).copy_(rows[name][:, : x.numel() // runs])
        if name in elements and plan.arrays[name].packed_of and blocks.unit % 2:
            x.view(runs, -1)[:, -1] &= 15  # the other half byte is no element's


def flat(x: Tensor, start: int, length: int) -> Tensor:
    """Return a 1-D alias of a stretch of a row-major tensor.

    Not a view: a view has a base, and Dynamo, where it is shown one, compiles once for every rank of bases.
    """
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset() + start, (length,), (1,))
